#pragma once
// Expert load and router losses of a step, from the routers' totals (ops/router.h).
#include <optional>
#include <vector>

#include "config/config.h"
#include "core/tensor.h"

namespace sluice {

struct LayerLoad {
  int64_t layer = 0;
  double max_over_mean =
      0;                 // busiest expert's tokens over the mean; num_experts / K when every token goes to it
  double entropy = 0;    // of the token fractions, divided by log E: 1 at balance, 0 if one expert gets all
  double variation = 0;  // coefficient of variation: standard deviation over mean
  int64_t idle = 0;      // experts without tokens
  double balance_loss = 0;  // in the scope used for training, without coefficient; 1 at balance
  double z_loss = 0;        // mean squared log-sum-exp, without coefficient
  std::vector<int64_t> counts;
};

struct RouterSummary {
  std::vector<LayerLoad> layers;        // those with experts
  double max_over_mean = 0;             // of the worst layer
  int64_t idle = 0;                     // experts without a token, over all layers
  double balance_loss = 0, z_loss = 0;  // means over layers
};

/// totals: make_router_totals (nn/moe.h), on the host, after a step. The result is empty for a dense model
/// or if nothing was counted. balance_loss uses the counts and probabilities of the whole step (scopes
/// global_batch and previous_step), or is the mean over the micro-batches.
std::optional<RouterSummary> summarize_router(const ModelConfig& model, const Tensor& totals);

}  // namespace sluice
