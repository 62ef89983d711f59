#pragma once
// What the Gated Attention paper measures (table 4, figures 2, 6 and 7; README.md), read after a forward
// from the tensors that backward reads: no hooks.
#include <optional>
#include <vector>

#include "core/context.h"
#include "nn/transformer.h"

namespace sluice {

struct LayerSummary {
  /// Mean over queries (t >= 0) and heads of the attention on the first visible key, before any gate
  /// multiplies: exp(z0 - lse), times 1 - A_sink where there is a sink logit.
  double first_token_attention = 0;
  std::vector<double> gate_scores;  // mean score of each gate, as in the configuration
  double attention_output_max =
      0;  // max |.| over tokens and channels: the branch that is added to the residual,
  double attention_residual_max = 0;  // the residual stream after it,
  double ffn_output_max = 0;          // and the same of the feed-forward network
  double ffn_residual_max = 0;
  /// Per head, how much of it its gate, its sink or its first key lets through (Attention::head_gate;
  /// the sink-aware paper, eq. 5), and their standard deviation over their mean (ddof 1). NaN and none where
  /// no gate says it; none with one head.
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

/// Averages over the batches given to add(), weighted by their tokens; maxima over all of them.
class SummaryAccumulator {
 public:
  explicit SummaryAccumulator(const Transformer& model);
  /// Reads what forward left in `saved`, which must keep every layer's activations (not Recompute::block).
  void add(Context& ctx, const Batch& batch, const Transformer::Saved& saved);
  ModelSummary result() const;

 private:
  const Transformer& model_;
  std::vector<LayerSummary> sums_;  // first_token_attention, gate_scores and importance are sums over tokens
  std::vector<double> counted_;     // per layer, the tokens that count for importance
  double tokens_ = 0;
};

}  // namespace sluice
