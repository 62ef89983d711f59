#include "analysis/summary.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "analysis/reading.h"
#include "analysis/whole_rows.h"
#include "core/score_range.h"
#include "ops/reduce.h"

namespace sluice {
namespace {

/// The sum over the queries of a gate's mean score. A learned constant has one row for all of them.
double sum_of_means(Context& ctx, const Tensor& scores, const Queries& queries) {
  ScratchScope scratch(ctx.scratch);
  const Tensor result = scratch.alloc("summary.sum", DType::f64, {1});
  const auto add = [&](const Tensor& rows, Into into) { sum(ctx, result, rows, into); };
  const auto width = static_cast<double>(scores.numel() / scores.dim(0));
  if (scores.dim(0) == 1) {
    add(scores, Into::overwrite);
    return static_cast<double>(queries.count) * read_scalar(ctx, result) / width;
  }
  if (queries.count == 0) return 0;
  for (const Queries::Rows& rows : queries.rows)
    add(scores.rows(rows.begin, rows.size), &rows == &queries.rows[0] ? Into::overwrite : Into::add);
  return read_scalar(ctx, result) / width;
}

/// Adds the norms of each token's values.
void add_value_norms(FirstAndRest& sums, const std::vector<double>& norms, int64_t heads,
                     const Queries& queries) {
  for (const Queries::Sequence& s : queries.sequences)
    for (int64_t i = s.begin * heads; i < (s.begin + s.size) * heads; ++i)
      (i < (s.begin + 1) * heads ? sums.first : sums.rest) += norms[static_cast<size_t>(i)];
}

}  // namespace

SummaryAccumulator::SummaryAccumulator(const Transformer& model, const ParamStore& store,
                                       const AnalysisConfig& config)
    : model_(model),
      store_(store),
      measure_(config),
      sums_(model.blocks().size()),
      queries_(measure_.no_queries()) {
  const int64_t heads = model.config().num_attention_heads;
  for (size_t layer = 0; layer < sums_.size(); ++layer) {
    sums_[layer].gate_scores.assign(model.blocks()[layer].attention().gates().size(), 0.0);
    sums_[layer].importance.assign(static_cast<size_t>(heads), 0.0);
  }
  first_token_.assign(sums_.size(), measure_.no_sums(heads));
  gate_health_.resize(sums_.size());
  for (auto& of_layer : gate_health_)
    for (const GateConfig& gate : model.config().attention.gates)
      of_layer.emplace_back(gate_heads(model.config(), gate.position));
  counted_.assign(sums_.size(), 0.0);
  selection_.resize(sums_.size());
}

void SummaryAccumulator::add_selected(Context& ctx, size_t layer, const Batch& batch,
                                      const Transformer::Saved& saved, const Queries& queries) {
  const Attention& attention = model_.blocks()[layer].attention();
  if (!attention.sparse() || model_.dense_warm_up()) return;
  add_selection(ctx, selection_[layer], attention, saved.blocks[layer].attention,
                layer > 0 ? &saved.blocks[layer - 1].attention : nullptr, batch.first_key, queries,
                model_.sequence_ranks());
}

void SummaryAccumulator::add(Context& ctx, const Batch& batch, const Transformer::Saved& saved) {
  SLUICE_CHECK(saved.recompute != Recompute::block,
               "SummaryAccumulator: the layers' activations share memory");
  const Queries queries(ctx, batch, measure_.classes(), model_.sequence_ranks());
  measure_.count(queries_, queries);
  for (size_t layer = 0; layer < sums_.size(); ++layer) {
    const int unit = static_cast<int>(layer) + 1;
    store_.begin_use(ctx, unit, Pass::forward);  // sinks and gates' weights are read
    if (gate_row_norms_.size() == layer)
      gate_row_norms_.push_back(gate_row_norms(ctx, store_, layer, model_.config()));
    add_layer(ctx, layer, batch, saved.blocks[layer], queries);
    add_selected(ctx, layer, batch, saved, queries);
    store_.end_use(ctx, unit, Pass::forward);
  }
  tokens_ += static_cast<double>(queries.count);
}

void SummaryAccumulator::add_layer(Context& ctx, size_t layer, const Batch& batch, const Block::Saved& s,
                                   const Queries& queries) {
  const Attention& attention = model_.blocks()[layer].attention();
  LayerSummary& sums = sums_[layer];
  const SequenceRanks* const ranks = model_.sequence_ranks();
  const FirstKey first_key(ctx, attention, s.attention, ranks);
  measure_.add(first_token_[layer], first_key, queries);
  counted_[layer] += add_importance(ctx, sums.importance, attention.head_gate(s.attention, batch.first_key),
                                    queries, batch.tokens.numel());
  const AttentionGates& gates = attention.gates();
  for (size_t g = 0; g < gates.size(); ++g) {
    ScratchScope scratch(ctx.scratch);
    const Tensor scores = scores_of(ctx, scratch, gates.gate(g), gates.saved(s.attention.gates, g));
    sums.gate_scores[g] += sum_of_means(ctx, scores, queries);
    if (!score_range(gates.gate(g).config().activation)) continue;
    if (scores.dim(0) == 1) gate_health_[layer][g].add(ctx, scores, queries.count);
    for (const Queries::Rows& rows : queries.rows)
      if (scores.dim(0) > 1) gate_health_[layer][g].add(ctx, scores.rows(rows.begin, rows.size), rows.size);
  }
  const Tensor& values = s.attention.gates[GatePosition::value].y;
  add_value_norms(sums.value_norm, value_norms(ctx, values, ranks), values.dim(1), queries);
  for (const Tensor& residual : {s.x1, s.y})
    raise(sums.residual_max, largest_of_queries(ctx, residual, queries, ranks));
  const std::pair<double*, const Tensor*> largest[] = {{&sums.attention_output_max, &s.attention_out.y},
                                                       {&sums.attention_residual_max, &s.x1},
                                                       {&sums.ffn_output_max, &s.ffn_out.y},
                                                       {&sums.ffn_residual_max, &s.y}};
  for (const auto& [most, of] : largest) raise(*most, largest_magnitude(ctx, *of, queries));
}

/// What was added with the queries of all ranks is equal on all of them.
void SummaryAccumulator::merge_ranks() {
  const SequenceRanks* const ranks = model_.sequence_ranks();
  if (!ranks) return;
  Parts parts;
  add_part(parts, Merge::sum, tokens_);
  add_part(parts, Merge::sum, counted_);
  for (size_t i = 0; i < sums_.size(); ++i) {
    LayerSummary& layer = sums_[i];
    for (auto* sums : {&layer.gate_scores, &layer.importance}) add_part(parts, Merge::sum, *sums);
    for (double* largest : {&layer.attention_output_max, &layer.attention_residual_max, &layer.ffn_output_max,
                            &layer.ffn_residual_max})
      add_part(parts, Merge::largest, *largest);
    for (GateHealthSums& gate : gate_health_[i]) gate.add_parts(parts);
  }
  merge_tokens(ranks, parts);
}

ModelSummary SummaryAccumulator::result() const {
  ModelSummary result;
  result.layers = sums_;
  if (measure_.classes().count() > 1) result.query_classes = measure_.classes().names();
  result.sink_threshold = measure_.threshold();
  result.sink_length = measure_.length();
  std::vector<HeadAttention> heads;
  const auto kv_heads = static_cast<double>(model_.config().num_key_value_heads);
  double scores = 0;
  int64_t gates = 0, counted = 0;
  for (size_t i = 0; i < result.layers.size(); ++i) {
    LayerSummary& layer = result.layers[i];
    for (double& x : layer.importance) x /= counted_[i];
    layer.imbalance = imbalance_of(layer.importance, 1);
    if (layer.imbalance) result.imbalance = result.imbalance.value_or(0) + *layer.imbalance, ++counted;
    if (selection_[i].queries > 0) layer.selection = means_of(selection_[i]);
    heads.push_back(layer.heads = measure_.means(first_token_[i], queries_));
    if (queries_.all > 0)
      for (const double x : layer.heads.all)
        layer.first_token_attention += x / static_cast<double>(layer.heads.all.size());
    layer.value_norm.first /= kv_heads * (queries_.all - queries_.later);  // NaN without queries
    layer.value_norm.rest /= kv_heads * queries_.later;
    result.value_norm.first += layer.value_norm.first / static_cast<double>(result.layers.size());
    result.value_norm.rest += layer.value_norm.rest / static_cast<double>(result.layers.size());
    raise(result.residual_max, layer.residual_max);
    for (size_t g = 0; g < gate_health_[i].size(); ++g)
      layer.gate_health.push_back(health_of(
          gate_health_[i][g], i < gate_row_norms_.size() ? gate_row_norms_[i][g] : std::vector<double>()));
    result.gates.insert(result.gates.end(), layer.gate_health.begin(), layer.gate_health.end());
    for (double& score : layer.gate_scores) {
      if (tokens_ > 0) score /= tokens_;
      scores += score;
      ++gates;
    }
    result.first_token_attention += layer.first_token_attention / static_cast<double>(result.layers.size());
    for (const double residual : {layer.attention_residual_max, layer.ffn_residual_max})
      raise(result.largest_residual, residual);
  }
  result.sinks = measure_.summary(heads);
  if (counted > 0) *result.imbalance /= static_cast<double>(counted);
  if (gates > 0) result.mean_gate_score = scores / static_cast<double>(gates);
  return result;
}

}  // namespace sluice
