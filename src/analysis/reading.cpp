#include "analysis/reading.h"

#include <algorithm>
#include <cmath>

#include "ops/gate.h"
#include "ops/reduce.h"

namespace sluice {

std::vector<double> read_values(Context& ctx, const Tensor& t) {
  std::vector<double> values(static_cast<size_t>(t ? t.numel() : 0));
  if (values.empty()) return values;
  const HostView view(ctx, t);
  if (ctx.dry_run) return values;
  const Tensor& host = view.tensor();
  const auto convert = [&](auto* from) {
    using S = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<double>(static_cast<accumulate_t<S>>(from[i]));
  };
  if (host.dtype == DType::f64) convert(host.as<double>());
  if (host.dtype == DType::f32) convert(host.as<float>());
  if (host.dtype == DType::bf16) convert(host.as<bf16>());
  return values;
}

double largest_magnitude(Context& ctx, const Tensor& x) {
  ScratchScope scratch(ctx.scratch);
  const Tensor result = scratch.alloc("analysis.largest", DType::f64, {1});
  max_abs(ctx, result, x);
  return read_scalar(ctx, result);
}

FirstKey::FirstKey(Context& ctx, const Attention& attention, const Attention::Saved& s)
    : heads_(s.core.lse.dim(0)),
      tokens_(s.core.lse.dim(1)),
      lse_(read_values(ctx, s.core.lse)),
      z0_(read_values(ctx, s.core.z0)),
      sinks_(read_values(ctx, attention.core().sinks())) {}

double FirstKey::kept(int64_t head, int64_t token) const {
  if (sinks_.empty()) return 1;
  return 1 / (1 + std::exp(sinks_[static_cast<size_t>(head)] - lse_[at(head, token)]));
}

double FirstKey::attention(int64_t head, int64_t token) const {
  return std::exp(std::min(z0_[at(head, token)] - lse_[at(head, token)], 0.0)) * kept(head, token);
}

Tensor scores_of(Context& ctx, ScratchScope& scratch, const Gate& gate, const Gate::Saved& s) {
  const Tensor z = gate.logits(s);
  const DType dtype = accumulate_dtype(z.dtype);
  const Tensor scores = z.rank == 3 ? scratch.alloc("analysis.scores", dtype, {z.dim(0), z.dim(1), z.dim(2)})
                                    : scratch.alloc("analysis.scores", dtype, {z.dim(0), z.dim(1)});
  gate_scores(ctx, scores, z, gate.kind());
  return scores;
}

std::vector<double> output_before_gates(Context& ctx, const Attention::Saved& s, const FirstKey& first_key) {
  if (s.output.y) return read_values(ctx, s.output.y);
  // The core applied the gate as well: what it found was not written down.
  const Tensor& o = s.core.o;
  std::vector<double> values = read_values(ctx, o);
  const int64_t T = o.dim(0), H = o.dim(1), D = o.dim(2);
  for (int64_t t = 0; t < T; ++t)
    for (int64_t h = 0; h < H; ++h) {
      const double kept = first_key.kept(h, t);
      for (int64_t d = 0; d < D; ++d) values[static_cast<size_t>((t * H + h) * D + d)] *= kept;
    }
  return values;
}

double add_importance(Context& ctx, std::vector<double>& sums, const std::optional<HeadGate>& gate,
                      int64_t tokens) {
  if (!gate) return 0;
  ScratchScope scratch(ctx.scratch);
  const Tensor row = scratch.alloc("analysis.importance", DType::f64, {head_row_size(std::ssize(sums))});
  head_importance(ctx, row, Tensor(), *gate, tokens);
  const std::vector<double> values = read_values(ctx, row);
  for (size_t h = 0; h < sums.size(); ++h) sums[h] += values[h];
  return values[sums.size()];
}

}  // namespace sluice
