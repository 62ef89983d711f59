#pragma once
// How far the gates of a layer are open, head by head (README.md): scores near their ends, heads that are
// shut, and the weights of each head's rows. For evaluation and `sluice analyze` alike.
#include <vector>

#include "analysis/sums.h"
#include "config/config.h"
#include "core/context.h"
#include "params/param_store.h"

namespace sluice {

constexpr double kShutBelow = 0.05, kOpenAbove = 0.95;
/// A head whose score is below kShutBelow for more than this share of the tokens is shut.
constexpr double kShutTokens = 0.99;

/// Heads that a gate's scores have: of queries, or of keys and values; one where they are joined.
int64_t gate_heads(const ModelConfig& config, GatePosition position);

/// Counts of one gate. Only a gate whose scores lie in [0, 1] (score_range) is counted.
struct GateHealthSums {
  explicit GateHealthSums(int64_t heads = 0);

  double tokens = 0, channels = 0;   // channels: of a head
  std::vector<double> below, above;  // (heads): scores below kShutBelow, and above kOpenAbove
  std::vector<double> shut;  // (heads): tokens whose score, the mean over channels, is below kShutBelow

  /// scores: scores_of() the gate for T tokens.
  void add(Context& ctx, const Tensor& scores, int64_t T);
  void add_parts(Parts& parts);
};

/// Shares of one gate, by head. Empty where nothing was counted.
struct GateHealth {
  std::vector<double> below, above, shut_tokens;  // (heads)
  std::vector<double> row_norms;                  // (heads): L2 norm of the head's rows of the gate's weight
  int64_t shut_heads() const;
};
/// Means of several gates' shares, and the share of all their heads that are shut; NaN where no gate was
/// counted.
struct GateShares {
  double below = 0, above = 0, shut_heads = 0;
};
GateShares shares_of(const std::vector<GateHealth>& gates);
GateHealth health_of(const GateHealthSums& sums, std::vector<double> row_norms);

/// Per gate of a layer and head: the L2 norm of the head's rows of the gate's weight (of the constants, if it
/// is learned constants). Of adapted weights the matrix without its adapters. `store` holds the layer's
/// weights now.
std::vector<std::vector<double>> gate_row_norms(Context& ctx, const ParamStore& store, size_t layer,
                                                const ModelConfig& config);

}  // namespace sluice
