#pragma once
// Measurements of the Gated Attention paper (table 4, figures 2, 6 and 7; README.md), taken after a forward
// pass from the tensors saved for backward, without hooks.
#include <optional>
#include <vector>

#include "core/context.h"
#include "nn/transformer.h"

namespace sluice {

struct LayerSummary {
  /// Mean over queries (t >= 0) and heads of the attention on the first visible key, before gates: exp(z0 -
  /// lse), times 1 - A_sink with a sink logit.
  double first_token_attention = 0;
  std::vector<double> gate_scores;  // mean score of each gate, as in the configuration
  double attention_output_max =
      0;  // max |.| over tokens and channels: of the branch output added to the residual,
  double attention_residual_max = 0;  // of the residual stream after the addition,
  double ffn_output_max = 0;          // and likewise for the feed-forward network
  double ffn_residual_max = 0;
  /// Importance of each head (Attention::head_gate; the sink-aware paper, eq. 5), and its standard deviation
  /// over mean across heads (ddof 1). NaN and none if no gate defines it; none with a single head.
  std::vector<double> importance;
  std::optional<double> imbalance;
};

struct ModelSummary {
  std::vector<LayerSummary> layers;
  double first_token_attention = 0;       // mean over layers
  std::optional<double> mean_gate_score;  // mean over layers and gates; none without gates
  double largest_residual = 0;            // max over layers, after either branch
  std::optional<double> imbalance;        // mean over layers
};

/// Averages over the batches passed to add(), weighted by tokens, and maxima over all batches.
class SummaryAccumulator {
 public:
  explicit SummaryAccumulator(const Transformer& model);
  /// Measures `saved` after forward; it must contain the activations of every layer (not Recompute::block).
  void add(Context& ctx, const Batch& batch, const Transformer::Saved& saved);
  ModelSummary result() const;

 private:
  const Transformer& model_;
  std::vector<LayerSummary> sums_;  // first_token_attention, gate_scores and importance are sums over tokens
  std::vector<double> counted_;     // per layer, number of tokens in the importance
  double tokens_ = 0;
};

}  // namespace sluice
