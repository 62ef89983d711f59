#pragma once
// Measurements of the tensors that forward saves for backward (Attention::Saved). Each quantity is defined
// here once, for evaluation (analysis/summary.h) and for `sluice analyze` (analysis/statistics.h).
#include <optional>
#include <vector>

#include "analysis/queries.h"
#include "core/context.h"
#include "core/host_view.h"
#include "nn/transformer.h"
#include "ops/head_importance.h"

namespace sluice {

/// All elements of a floating-point tensor on any device; waits. Empty for an empty tensor; zeros in a dry
/// run.
std::vector<double> read_values(Context& ctx, const Tensor& t);

/// max |x| of x (T, C) over this rank's queries, computed on the device; NaN if any element is NaN.
double largest_magnitude(Context& ctx, const Tensor& x, const Queries& queries);

/// ||v_t||_2 of values (T, heads, D), in f64: (T, heads). This and the next two are of the tokens of all
/// ranks that share the sequences, and collective, where `ranks` are given.
std::vector<double> value_norms(Context& ctx, const Tensor& values, const SequenceRanks* ranks = nullptr);

/// Of first tokens, and of all others.
struct FirstAndRest {
  double first = 0, rest = 0;
};

/// x = max(x, value), where a NaN stays.
void raise(double& x, double value);
void raise(FirstAndRest& x, const FirstAndRest& values);

/// max |x| of x (T, C), over the queries of sequences; NaN if any of them is NaN.
FirstAndRest largest_of_queries(Context& ctx, const Tensor& x, const Queries& queries,
                                const SequenceRanks* ranks = nullptr);

/// Attention on the first key of a query's sequence (src/analysis/README.md), from lse and z0 (H, T), in f64.
class FirstKey {
 public:
  FirstKey(Context& ctx, const Attention& attention, const Attention::Saved& s,
           const SequenceRanks* ranks = nullptr);

  int64_t heads() const { return heads_; }
  int64_t tokens() const { return tokens_; }
  /// 1 - A_sink = sigmoid(lse - sink_h): the attention that a sink, or an extra key, leaves to the keys; 1
  /// without one.
  double kept(int64_t head, int64_t token) const;
  /// A channel of the extra key's value (ops/extra_key.h); 0 without one.
  double sink_value(int64_t head, int64_t channel, int64_t head_dim) const;
  /// Attention on the sequence's first key, before any gate multiplies: exp(z0 - lse), times kept(); 0 where
  /// a window ends before it.
  double attention(int64_t head, int64_t token) const;

 private:
  size_t at(int64_t head, int64_t token) const { return static_cast<size_t>(head * tokens_ + token); }

  int64_t heads_, tokens_;
  std::vector<double> lse_, z0_, sinks_, sink_value_;
};

/// A gate's scores after activation and sharing: (T, H, D) or (T, H), or one row (1, ...) for all tokens if
/// the gate is a learned constant. In scratch memory on the model's device, of accumulate_dtype.
Tensor scores_of(Context& ctx, ScratchScope& scratch, const Gate& gate, const Gate::Saved& s);

/// The attention output (T, H, D) before the gates at sdpa_output: joined by the sink, normalised, activated.
/// Recovered from the saved tensors if a kernel fused these operations.
std::vector<double> output_before_gates(Context& ctx, const Attention::Saved& s, const FirstKey& first_key);

/// sums (H) += the importance of each head, summed over this rank's queries of a batch of `tokens` tokens.
/// Returns the number of queries that count (ops/head_importance.h); 0 if Attention::head_gate gives no gate.
double add_importance(Context& ctx, std::vector<double>& sums, const std::optional<HeadGate>& gate,
                      const Queries& queries, int64_t tokens);

}  // namespace sluice
