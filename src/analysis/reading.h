#pragma once
// How the tensors that backward reads (Attention::Saved) are read by those who measure: each quantity is
// defined here once, for evaluation (analysis/summary.h) and for `sluice analyze` (analysis/statistics.h).
#include <optional>
#include <vector>

#include "core/context.h"
#include "core/host_view.h"
#include "nn/transformer.h"
#include "ops/head_importance.h"

namespace sluice {

/// Every element of a tensor of floats, from any device. Waits. Empty of an empty tensor; zeros in a dry run.
std::vector<double> read_values(Context& ctx, const Tensor& t);

/// max |x|, from the device. NaN where an element is.
double largest_magnitude(Context& ctx, const Tensor& x);

/// What softmax says about the first key that a query sees (src/analysis/README.md), from lse and z0 (H, T),
/// in f64.
class FirstKey {
 public:
  FirstKey(Context& ctx, const Attention& attention, const Attention::Saved& s);

  int64_t heads() const { return heads_; }
  int64_t tokens() const { return tokens_; }
  /// 1 - A_sink = sigmoid(lse - sink_h): what a sink leaves to the keys; 1 without one.
  double kept(int64_t head, int64_t token) const;
  /// Attention on the first visible key, before any gate multiplies: exp(z0 - lse), times kept().
  double attention(int64_t head, int64_t token) const;

 private:
  size_t at(int64_t head, int64_t token) const { return static_cast<size_t>(head * tokens_ + token); }

  int64_t heads_, tokens_;
  std::vector<double> lse_, z0_, sinks_;
};

/// A gate's scores, after activation and sharing: (T, H, D) or (T, H); one row (1, ...) of a learned
/// constant, which holds for all tokens. In scratch memory of the model's device; accumulate_dtype.
Tensor scores_of(Context& ctx, ScratchScope& scratch, const Gate& gate, const Gate::Saved& s);

/// The attention's output (T, H, D) as the gates at sdpa_output find it: times kept(), normalised, activated.
/// Where a kernel fused all that, from what it left.
std::vector<double> output_before_gates(Context& ctx, const Attention::Saved& s, const FirstKey& first_key);

/// sums (H) += how open each head is, over a batch's tokens. Returns how many of them count
/// (ops/head_importance.h); 0 without a gate, which is what Attention::head_gate says.
double add_importance(Context& ctx, std::vector<double>& sums, const std::optional<HeadGate>& gate,
                      int64_t tokens);

/// Standard deviation over mean of the heads' importance (equation 6), with ddof 1 or 0; none where that is
/// no number: too few heads, or all closed.
std::optional<double> imbalance_of(const std::vector<double>& importance, int ddof);

/// The values (T, Hkv, D) that attention adds up: behind their gates.
const Tensor& attended_values(const Attention& attention, const Attention::Saved& s);

}  // namespace sluice
