#include "analysis/summary.h"

#include <algorithm>
#include <cmath>

#include "core/host_view.h"
#include "ops/gate.h"
#include "ops/reduce.h"

namespace sluice {
namespace {

double largest(Context& ctx, const Tensor& t) {
  ScratchScope scratch(ctx.scratch);
  const Tensor result = scratch.alloc("summary.largest", DType::f64, {1});
  max_abs(ctx, result, t);
  return read_scalar(ctx, result);
}

double mean(Context& ctx, const Tensor& t) {
  ScratchScope scratch(ctx.scratch);
  const Tensor result = scratch.alloc("summary.sum", DType::f64, {1});
  sum(ctx, result, t, Into::overwrite);
  return read_scalar(ctx, result) / static_cast<double>(t.numel());
}

/// z (Z, H, D) or (Z, H) after activation and sharing.
double mean_score(Context& ctx, const Gate& gate, const Gate::Saved& saved) {
  const Tensor z = gate.logits(saved);
  ScratchScope t(ctx.scratch);
  const DType dtype = accumulate_dtype(z.dtype);
  const Tensor scores = z.rank == 3 ? t.alloc("summary.scores", dtype, {z.dim(0), z.dim(1), z.dim(2)})
                                    : t.alloc("summary.scores", dtype, {z.dim(0), z.dim(1)});
  gate_scores(ctx, scores, z, gate.kind());
  return mean(ctx, scores);
}

/// lse, z0 (H, T); sinks (H), or empty. Sums of positive terms below 1: plain loops in f64 are exact enough.
template <class T, class S>
double mean_first_token_attention(const Tensor& lse, const Tensor& z0, const S* sinks) {
  const int64_t heads = lse.dim(0), tokens = lse.dim(1);
  double total = 0;
  for (int64_t h = 0; h < heads; ++h) {
    const T* l = lse.as<T>() + h * tokens;
    const T* z = z0.as<T>() + h * tokens;
    for (int64_t t = 0; t < tokens; ++t) {
      // The sink's logit joins the denominator: A = e^z0 / (e^lse + e^sink).
      const double gate =
          sinks ? 1 / (1 + std::exp(static_cast<double>(static_cast<accumulate_t<S>>(sinks[h])) - l[t])) : 1;
      total += std::exp(std::min(static_cast<double>(z[t]) - l[t], 0.0)) * gate;
    }
  }
  return total / static_cast<double>(heads * tokens);
}

double first_token_attention(Context& ctx, const Attention& attention, const Attention::Saved& s) {
  const HostView lse_view(ctx, s.lse), z0_view(ctx, s.z0), sinks_view(ctx, attention.sinks());
  const Tensor &lse = lse_view.tensor(), &z0 = z0_view.tensor(), &sinks = sinks_view.tensor();
  if (lse.dtype == DType::f64)
    return mean_first_token_attention<double, double>(lse, z0, sinks ? sinks.as<double>() : nullptr);
  if (sinks && sinks.dtype == DType::bf16)
    return mean_first_token_attention<float, bf16>(lse, z0, sinks.as<bf16>());
  return mean_first_token_attention<float, float>(lse, z0, sinks ? sinks.as<float>() : nullptr);
}

}  // namespace

SummaryAccumulator::SummaryAccumulator(const Transformer& model)
    : model_(model), sums_(model.blocks().size()) {
  for (size_t layer = 0; layer < sums_.size(); ++layer)
    sums_[layer].gate_scores.assign(model.blocks()[layer].attention().gates().size(), 0.0);
}

void SummaryAccumulator::add(Context& ctx, const Batch& batch, const Transformer::Saved& saved) {
  SLUICE_CHECK(saved.recompute != Recompute::block,
               "SummaryAccumulator: the layers' activations share memory");
  const auto tokens = static_cast<double>(batch.tokens.numel());
  for (size_t layer = 0; layer < sums_.size(); ++layer) {
    const Attention& attention = model_.blocks()[layer].attention();
    const Block::Saved& s = saved.blocks[layer];
    LayerSummary& sums = sums_[layer];
    if (!ctx.dry_run) sums.first_token_attention += tokens * first_token_attention(ctx, attention, s.attention);
    for (size_t g = 0; g < attention.gates().size(); ++g)
      sums.gate_scores[g] += tokens * mean_score(ctx, attention.gates()[g], s.attention.gates[g]);
    sums.attention_output_max = std::max(sums.attention_output_max, largest(ctx, s.attention_out.y));
    sums.attention_residual_max = std::max(sums.attention_residual_max, largest(ctx, s.x1));
    sums.ffn_output_max = std::max(sums.ffn_output_max, largest(ctx, s.ffn_out.y));
    sums.ffn_residual_max = std::max(sums.ffn_residual_max, largest(ctx, s.y));
  }
  tokens_ += tokens;
}

ModelSummary SummaryAccumulator::result() const {
  ModelSummary result;
  result.layers = sums_;
  double scores = 0;
  int64_t gates = 0;
  for (LayerSummary& layer : result.layers) {
    if (tokens_ > 0) layer.first_token_attention /= tokens_;
    for (double& score : layer.gate_scores) {
      if (tokens_ > 0) score /= tokens_;
      scores += score;
      ++gates;
    }
    result.first_token_attention += layer.first_token_attention / static_cast<double>(result.layers.size());
    result.largest_residual =
        std::max({result.largest_residual, layer.attention_residual_max, layer.ffn_residual_max});
  }
  if (gates > 0) result.mean_gate_score = scores / static_cast<double>(gates);
  return result;
}

}  // namespace sluice
