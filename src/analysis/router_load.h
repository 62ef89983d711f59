#pragma once
// What routers did in a step, from what they add up (ops/router.h): how evenly experts are loaded, and the
// routers' losses.
#include <optional>
#include <vector>

#include "config/config.h"
#include "core/tensor.h"

namespace sluice {

struct LayerLoad {
  int64_t layer = 0;
  double max_over_mean =
      0;                 // busiest expert's tokens over the mean; num_experts / K when every token goes to it
  double entropy = 0;    // of the shares, over log E: 1 at balance, 0 when one expert has all
  double variation = 0;  // coefficient of variation: standard deviation over mean
  int64_t idle = 0;      // experts without a token
  double balance_loss = 0;  // of the scope that trains, before its coefficient; 1 at balance
  double z_loss = 0;        // mean squared log-sum-exp, before its coefficient
  std::vector<int64_t> counts;
};

struct RouterSummary {
  std::vector<LayerLoad> layers;        // those with experts
  double max_over_mean = 0;             // the worst layer's
  int64_t idle = 0;                     // experts without a token, over all layers
  double balance_loss = 0, z_loss = 0;  // means over layers
};

/// totals: Transformer::make_router_totals, on the host, after a step. Empty for a dense model or when
/// nothing was counted. balance_loss is that of the whole step's counts and probabilities (scopes
/// global_batch and previous_step), or the mean over the micro-batches.
std::optional<RouterSummary> summarize_router(const ModelConfig& model, const Tensor& totals);

}  // namespace sluice
