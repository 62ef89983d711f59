#include "analysis/summary.h"

#include <algorithm>

#include "analysis/reading.h"
#include "ops/reduce.h"

namespace sluice {
namespace {

double mean(Context& ctx, const Tensor& t) {
  ScratchScope scratch(ctx.scratch);
  const Tensor result = scratch.alloc("summary.sum", DType::f64, {1});
  sum(ctx, result, t, Into::overwrite);
  return read_scalar(ctx, result) / static_cast<double>(t.numel());
}

double mean_score(Context& ctx, const Gate& gate, const Gate::Saved& saved) {
  ScratchScope scratch(ctx.scratch);
  return mean(ctx, scores_of(ctx, scratch, gate, saved));
}

double mean_first_token_attention(const FirstKey& first_key) {
  double total = 0;
  for (int64_t h = 0; h < first_key.heads(); ++h)
    for (int64_t t = 0; t < first_key.tokens(); ++t) total += first_key.attention(h, t);
  return total / static_cast<double>(first_key.heads() * first_key.tokens());
}

}  // namespace

SummaryAccumulator::SummaryAccumulator(const Transformer& model)
    : model_(model), sums_(model.blocks().size()) {
  for (size_t layer = 0; layer < sums_.size(); ++layer) {
    sums_[layer].gate_scores.assign(model.blocks()[layer].attention().gates().size(), 0.0);
    sums_[layer].importance.assign(static_cast<size_t>(model.config().num_attention_heads), 0.0);
  }
  counted_.assign(sums_.size(), 0.0);
}

void SummaryAccumulator::add(Context& ctx, const Batch& batch, const Transformer::Saved& saved) {
  SLUICE_CHECK(saved.recompute != Recompute::block,
               "SummaryAccumulator: the layers' activations share memory");
  const auto tokens = static_cast<double>(batch.tokens.numel());
  for (size_t layer = 0; layer < sums_.size(); ++layer) {
    const Attention& attention = model_.blocks()[layer].attention();
    const Block::Saved& s = saved.blocks[layer];
    LayerSummary& sums = sums_[layer];
    const FirstKey first_key(ctx, attention, s.attention);
    if (!ctx.dry_run) sums.first_token_attention += tokens * mean_first_token_attention(first_key);
    counted_[layer] += add_importance(ctx, sums.importance, attention.head_gate(s.attention, batch.first_key),
                                      batch.tokens.numel());
    const AttentionGates& gates = attention.gates();
    for (size_t g = 0; g < gates.size(); ++g)
      sums.gate_scores[g] += tokens * mean_score(ctx, gates.gate(g), gates.saved(s.attention.gates, g));
    sums.attention_output_max =
        std::max(sums.attention_output_max, largest_magnitude(ctx, s.attention_out.y));
    sums.attention_residual_max = std::max(sums.attention_residual_max, largest_magnitude(ctx, s.x1));
    sums.ffn_output_max = std::max(sums.ffn_output_max, largest_magnitude(ctx, s.ffn_out.y));
    sums.ffn_residual_max = std::max(sums.ffn_residual_max, largest_magnitude(ctx, s.y));
  }
  tokens_ += tokens;
}

ModelSummary SummaryAccumulator::result() const {
  ModelSummary result;
  result.layers = sums_;
  double scores = 0;
  int64_t gates = 0, counted = 0;
  for (size_t i = 0; i < result.layers.size(); ++i) {
    LayerSummary& layer = result.layers[i];
    for (double& x : layer.importance) x /= counted_[i];
    layer.imbalance = imbalance_of(layer.importance, 1);
    if (layer.imbalance) result.imbalance = result.imbalance.value_or(0) + *layer.imbalance, ++counted;
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
  if (counted > 0) *result.imbalance /= static_cast<double>(counted);
  if (gates > 0) result.mean_gate_score = scores / static_cast<double>(gates);
  return result;
}

}  // namespace sluice
