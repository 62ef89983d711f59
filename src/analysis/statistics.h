#pragma once
// Statistics of the papers over many sequences (Gated Attention, Qiu et al. 2025, figures 2 to 7; the
// sink-aware paper's importance and value norms; README.md). Sums are in f64, one sequence at a time, so that
// results do not depend on micro-batches, threads or the number of ranks, provided that ranks merge in the
// order of the sequences. "The first token" is the first key visible to a query: the first token of the
// sample or, with a document mask, of the document.
#include <array>
#include <limits>
#include <optional>
#include <vector>

#include "analysis/first_token.h"
#include "analysis/gate_health.h"
#include "analysis/selection.h"
#include "analysis/sums.h"
#include "core/context.h"
#include "nn/transformer.h"

namespace sluice {

/// Resolution of histograms, which are reported in 50 and in 100 bins; quantiles are interpolated within a
/// bin.
constexpr int64_t kFineBins = 2000;
/// "Near zero" of figure 5.
constexpr std::array<double, 2> kThresholds = {1e-2, 1e-3};

/// Sums of one gate over tokens, heads and channels; scores shared by heads count once per head.
struct GateSums {
  double count = 0, sum = 0, squares = 0;
  double least = std::numeric_limits<double>::infinity(), largest = -std::numeric_limits<double>::infinity();
  double first_count = 0, first_sum = 0;  // over first tokens
  std::vector<double> bins;               // (kFineBins) of [0, 1], where the activation has a score_range
  GateHealthSums health;                  // likewise
};

struct LayerSums {
  FirstTokenSums first_token;
  std::vector<double> importance;  // (H): see Attention::head_gate and ops/head_importance.h
  double importance_tokens = 0;    // number of tokens in it
  std::vector<GateSums> gates;     // as in the configuration
  double outputs = 0;              // elements of the attention's output
  double before = 0, after = 0;    // |.| of it, before and after the gates at sdpa_output
  std::array<double, 2> small_before{}, small_after{};  // number of elements below kThresholds
  /// max |.| of the branch output added to the residual stream, and of the stream after the addition, for
  /// attention and for the FFN.
  double attention_output = 0, attention_residual = 0, ffn_output = 0, ffn_residual = 0;
  std::vector<double> value_norms;  // (Hkv, seq_len): ||v_t||_2 by position in the sequence
  double first_value_norms = 0;     // over first tokens and key/value heads
  FirstAndRest residual = {};       // max |.| after either branch, at first tokens and at all others
  SelectionSums selection = {};     // of sparse attention, in the sparse phase
};

class Statistics {
 public:
  Statistics(const Transformer& model, int64_t seq_len, const AnalysisConfig& config = {});

  /// Adds one sequence of seq_len tokens after its forward pass, which kept its activations in `saved` (not
  /// Recompute::block). A token that is its own first_key is a first token. Collective where ranks share the
  /// sequences: the batch is of this rank's tokens.
  void add(Context& ctx, const Batch& batch, const Transformer::Saved& saved);
  /// Collective where ranks share the sequences, once, after all of them are added: what each rank has added
  /// of its own tokens alone becomes that of all tokens.
  void merge_tokens();
  void merge(Statistics& other);

  /// For ranks: see analysis/sums.h.
  Parts parts();

  double sequences = 0, tokens = 0, first_tokens = 0;
  QueryCounts queries;
  std::vector<LayerSums> layers;

  const Transformer& model() const { return *model_; }
  int64_t seq_len() const { return seq_len_; }
  const FirstTokenMeasure& measure() const { return measure_; }

 private:
  FirstTokenMeasure measure_;
  const Transformer* model_;
  int64_t seq_len_;
};

/// Statistics that need means and extremes first, from a second pass over the same sequences.
class SecondPass {
 public:
  struct Layer {
    std::vector<std::vector<double>>
        bins;  // (kFineBins) of [edges], per gate; empty where the activation is bounded
    /// Elements of the attention's output that are below kThresholds when multiplied by the mean score of the
    /// gates at sdpa_output: of this layer, or of all layers.
    std::array<double, 2> small_scaled{}, small_scaled_by_all{};
  };

  explicit SecondPass(const Statistics& first);
  /// Whether the second pass is needed.
  bool needed() const { return needed_; }
  void add(Context& ctx, const Transformer::Saved& saved);
  /// As of Statistics.
  void merge_tokens();
  Parts parts();

  /// Edges of an unbounded gate's bins: its extremes over all layers.
  std::pair<double, double> edges(size_t gate) const { return edges_[gate]; }
  /// The factor of small_scaled; none if no gate multiplies at sdpa_output.
  const std::vector<std::optional<double>>& mean_gate() const { return mean_gate_; }
  std::optional<double> mean_gate_of_all() const { return mean_gate_of_all_; }

  std::vector<Layer> layers;

 private:
  const Transformer* model_;
  bool needed_ = false;
  std::vector<std::pair<double, double>> edges_;
  std::vector<std::optional<double>> mean_gate_;
  std::optional<double> mean_gate_of_all_;
};

}  // namespace sluice
