#pragma once
// Measurements of the tensors that forward saves for backward (Attention::Saved). Each quantity is defined
// here once, for evaluation (analysis/summary.h) and for `sluice analyze` (analysis/statistics.h).
#include <optional>
#include <vector>

#include "core/context.h"
#include "core/host_view.h"
#include "nn/transformer.h"
#include "ops/head_importance.h"

namespace sluice {

/// All elements of a floating-point tensor on any device; waits. Empty for an empty tensor; zeros in a dry
/// run.
std::vector<double> read_values(Context& ctx, const Tensor& t);

/// max |x|, computed on the device; NaN if any element is NaN.
double largest_magnitude(Context& ctx, const Tensor& x);

/// Attention on the first key visible to a query (src/analysis/README.md), from lse and z0 (H, T), in f64.
class FirstKey {
 public:
  FirstKey(Context& ctx, const Attention& attention, const Attention::Saved& s);

  int64_t heads() const { return heads_; }
  int64_t tokens() const { return tokens_; }
  /// 1 - A_sink = sigmoid(lse - sink_h): the attention that a sink leaves to the keys; 1 without a sink.
  double kept(int64_t head, int64_t token) const;
  /// Attention on the first visible key, before any gate multiplies: exp(z0 - lse), times kept().
  double attention(int64_t head, int64_t token) const;

 private:
  size_t at(int64_t head, int64_t token) const { return static_cast<size_t>(head * tokens_ + token); }

  int64_t heads_, tokens_;
  std::vector<double> lse_, z0_, sinks_;
};

/// A gate's scores after activation and sharing: (T, H, D) or (T, H), or one row (1, ...) for all tokens if
/// the gate is a learned constant. In scratch memory on the model's device, of accumulate_dtype.
Tensor scores_of(Context& ctx, ScratchScope& scratch, const Gate& gate, const Gate::Saved& s);

/// The attention output (T, H, D) before the gates at sdpa_output: times kept(), normalised, activated.
/// Recovered from the saved tensors if a kernel fused these operations.
std::vector<double> output_before_gates(Context& ctx, const Attention::Saved& s, const FirstKey& first_key);

/// sums (H) += the importance of each head, summed over a batch's tokens. Returns the number of tokens that
/// count (ops/head_importance.h); 0 if Attention::head_gate gives no gate.
double add_importance(Context& ctx, std::vector<double>& sums, const std::optional<HeadGate>& gate,
                      int64_t tokens);

}  // namespace sluice
