#pragma once
// Measurements of the Gated Attention paper (table 4, figures 2, 6 and 7; README.md), taken after a forward
// pass from the tensors saved for backward, without hooks.
#include <optional>
#include <string>
#include <vector>

#include "analysis/first_token.h"
#include "analysis/gate_health.h"
#include "analysis/selection.h"
#include "core/context.h"
#include "nn/transformer.h"

namespace sluice {

struct LayerSummary {
  /// Mean over all queries and heads of the attention on the first visible key, before gates: exp(z0 - lse),
  /// times 1 - A_sink with a sink logit.
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
  HeadAttention heads = {};
  /// Mean norm of the values, over key/value heads, at first tokens and at all others.
  FirstAndRest value_norm = {};
  /// max |.| of the residual stream after either branch, at first tokens and at all others.
  FirstAndRest residual_max = {};
  std::vector<GateHealth> gate_health = {};        // as in the configuration
  std::optional<SelectionSummary> selection = {};  // of sparse attention, in the sparse phase
};

struct ModelSummary {
  std::vector<LayerSummary> layers;
  double first_token_attention = 0;        // mean over layers
  std::optional<double> mean_gate_score;   // mean over layers and gates; none without gates
  double largest_residual = 0;             // max over layers, after either branch
  std::optional<double> imbalance;         // mean over layers
  std::vector<std::string> query_classes;  // names of the classes of HeadAttention::by_class; empty without
  double sink_threshold = 0;               // analysis.sink_threshold
  int64_t sink_length = 0;                 // analysis.sink_length
  SinkSummary sinks;
  FirstAndRest value_norm;        // mean over layers
  FirstAndRest residual_max;      // largest of all layers
  std::vector<GateHealth> gates;  // of all layers
};

/// Averages over the batches passed to add(), weighted by tokens, and maxima over all batches.
class SummaryAccumulator {
 public:
  /// store: the model's, whose weights are brought together layer by layer where ranks share them (collective
  /// like the forward pass).
  SummaryAccumulator(const Transformer& model, const ParamStore& store, const AnalysisConfig& config);
  /// Measures `saved` after forward; it must contain the activations of every layer (not Recompute::block).
  void add(Context& ctx, const Batch& batch, const Transformer::Saved& saved);
  /// Collective, after the last add(): where ranks share the sequences, what each has added of its own tokens
  /// becomes what all have.
  void merge_ranks();
  ModelSummary result() const;

 private:
  void add_layer(Context& ctx, size_t layer, const Batch& batch, const Block::Saved& s,
                 const Queries& queries);
  void add_selected(Context& ctx, size_t layer, const Batch& batch, const Transformer::Saved& saved,
                    const Queries& queries);

  const Transformer& model_;
  const ParamStore& store_;
  FirstTokenMeasure measure_;
  std::vector<LayerSummary> sums_;  // gate_scores, importance and value_norm are sums
  std::vector<FirstTokenSums> first_token_;
  std::vector<std::vector<GateHealthSums>> gate_health_;          // by layer and gate
  std::vector<std::vector<std::vector<double>>> gate_row_norms_;  // by layer, gate and head
  std::vector<SelectionSums> selection_;
  QueryCounts queries_;
  std::vector<double> counted_;  // per layer, number of tokens in the importance
  double tokens_ = 0;
};

}  // namespace sluice
