#include "analysis/statistics.h"

#include <cmath>

#include "analysis/reading.h"
#include "analysis/whole_rows.h"
#include "core/score_range.h"

namespace sluice {
namespace {

/// The fine bin of x; the last one holds its upper edge, too.
size_t bin_of(double x, double low, double high) {
  const double place = high > low ? (x - low) / (high - low) * static_cast<double>(kFineBins) : 0;
  return static_cast<size_t>(std::clamp<int64_t>(static_cast<int64_t>(place), 0, kFineBins - 1));
}

/// The scores of all tokens, T rows in turn; a learned constant's one row stands for every token.
template <class Row>
void for_each_score_row(Context& ctx, const Gate& gate, const Gate::Saved& s, int64_t T, const Row& row) {
  ScratchScope scratch(ctx.scratch);
  const Tensor scores = scores_of(ctx, scratch, gate, s);
  const std::vector<double> values = read_values(ctx, scores);
  if (ctx.dry_run) return;
  const int64_t width = scores.numel() / scores.dim(0);
  for (int64_t t = 0; t < T; ++t) row(t, values.data() + (scores.dim(0) == 1 ? 0 : t * width), width);
}

void add_gate(Context& ctx, GateSums& sums, const Gate& gate, const Gate::Saved& s,
              const std::vector<bool>& starts) {
  for_each_score_row(ctx, gate, s, static_cast<int64_t>(starts.size()),
                     [&](int64_t t, const double* scores, int64_t width) {
                       double sum = 0;
                       for (int64_t i = 0; i < width; ++i) {
                         const double x = scores[i];
                         sum += x;
                         sums.squares += x * x;
                         sums.least = std::min(sums.least, x);
                         sums.largest = std::max(sums.largest, x);
                         if (!sums.bins.empty()) ++sums.bins[bin_of(x, 0, 1)];
                       }
                       sums.count += static_cast<double>(width);
                       sums.sum += sum;
                       if (!starts[static_cast<size_t>(t)]) return;
                       sums.first_count += static_cast<double>(width);
                       sums.first_sum += sum;
                     });
  if (!score_range(gate.config().activation)) return;
  ScratchScope scratch(ctx.scratch);
  sums.health.add(ctx, scores_of(ctx, scratch, gate, s), static_cast<int64_t>(starts.size()));
}

double count_below(const std::vector<double>& values, double factor, double threshold) {
  double count = 0;
  for (const double x : values) count += std::abs(x) * factor < threshold;
  return count;
}

double sum_of_magnitudes(const std::vector<double>& values) {
  double sum = 0;
  for (const double x : values) sum += std::abs(x);
  return sum;
}

void add_outputs(Context& ctx, LayerSums& sums, const Attention::Saved& s, const FirstKey& first_key) {
  const std::vector<double> before = output_before_gates(ctx, s, first_key),
                            after = read_values(ctx, s.gates[GatePosition::sdpa_output].y);
  if (ctx.dry_run) return;
  sums.outputs += static_cast<double>(before.size());
  sums.before += sum_of_magnitudes(before);
  sums.after += sum_of_magnitudes(after);
  for (size_t i = 0; i < kThresholds.size(); ++i) {
    sums.small_before[i] += count_below(before, 1, kThresholds[i]);
    sums.small_after[i] += count_below(after, 1, kThresholds[i]);
  }
}

void add_value_norms(Context& ctx, LayerSums& sums, const Tensor& values, const std::vector<bool>& starts,
                     const SequenceRanks* ranks) {
  const std::vector<double> norms = value_norms(ctx, values, ranks);
  const int64_t T = std::ssize(starts), heads = values.dim(1);
  for (int64_t t = 0; t < T; ++t)
    for (int64_t h = 0; h < heads; ++h) {
      const double norm = norms[static_cast<size_t>(t * heads + h)];
      sums.value_norms[static_cast<size_t>(h * T + t)] += norm;
      if (starts[static_cast<size_t>(t)]) sums.first_value_norms += norm;
    }
}

/// Those to which a rank adds its own tokens alone. The others are found from the tokens of all ranks that
/// share the sequences, on each of them.
void add_token_parts(Parts& parts, LayerSums& l) {
  add_part(parts, Merge::sum, l.importance);
  for (double* x : {&l.importance_tokens, &l.outputs, &l.before, &l.after}) add_part(parts, Merge::sum, *x);
  for (auto* x : {&l.small_before, &l.small_after}) parts.push_back({Merge::sum, x->data(), std::ssize(*x)});
  for (double* x : {&l.attention_output, &l.attention_residual, &l.ffn_output, &l.ffn_residual})
    add_part(parts, Merge::largest, *x);
  for (GateSums& g : l.gates) {
    for (double* x : {&g.count, &g.sum, &g.squares, &g.first_count, &g.first_sum})
      add_part(parts, Merge::sum, *x);
    add_part(parts, Merge::sum, g.bins);
    g.health.add_parts(parts);
    add_part(parts, Merge::smallest, g.least);
    add_part(parts, Merge::largest, g.largest);
  }
}

/// Which of this rank's tokens are first tokens, of those of all ranks that share the sequence.
std::vector<bool> own_of(const std::vector<bool>& starts, const SequenceRanks* ranks) {
  if (!ranks) return starts;
  std::vector<bool> own;
  for (int64_t t = 0; t < ranks->split().length(); ++t)
    own.push_back(starts[static_cast<size_t>(ranks->split().token_of(t))]);
  return own;
}

}  // namespace

Statistics::Statistics(const Transformer& model, int64_t seq_len, const AnalysisConfig& config)
    : layers(model.blocks().size()), measure_(config), model_(&model), seq_len_(seq_len) {
  const auto heads = static_cast<size_t>(model.config().num_attention_heads),
             kv_heads = static_cast<size_t>(model.config().num_key_value_heads);
  queries = measure_.no_queries();
  for (size_t l = 0; l < layers.size(); ++l) {
    layers[l].first_token = measure_.no_sums(model.config().num_attention_heads);
    layers[l].importance.assign(heads, 0);
    layers[l].value_norms.assign(kv_heads * static_cast<size_t>(seq_len), 0);
    const AttentionGates& gates = model.blocks()[l].attention().gates();
    for (size_t g = 0; g < gates.size(); ++g) {
      layers[l].gates.emplace_back();
      layers[l].gates.back().health =
          GateHealthSums(gate_heads(model.config(), gates.gate(g).config().position));
      if (score_range(gates.gate(g).config().activation)) layers[l].gates.back().bins.assign(kFineBins, 0);
    }
  }
}

void Statistics::add(Context& ctx, const Batch& batch, const Transformer::Saved& saved) {
  SLUICE_CHECK(saved.recompute != Recompute::block, "Statistics: the layers' activations share memory");
  const SequenceRanks* const ranks = model_->sequence_ranks();
  const int64_t mine = batch.tokens.numel();
  SLUICE_CHECK(mine == (ranks ? ranks->split().length() : seq_len_),
               "Statistics: {} tokens of a sequence, expected {}", mine, seq_len_);
  const Queries seen(ctx, batch, measure_.classes(), ranks);
  measure_.count(queries, seen);
  std::vector<bool> starts(static_cast<size_t>(seq_len_));
  for (const Queries::Sequence& s : seen.sequences) starts[static_cast<size_t>(s.begin)] = true;
  const std::vector<bool> own_starts = own_of(starts, ranks);
  for (size_t l = 0; l < layers.size(); ++l) {
    const Attention& attention = model_->blocks()[l].attention();
    const Block::Saved& s = saved.blocks[l];
    LayerSums& sums = layers[l];
    const FirstKey own(ctx, attention, s.attention);
    std::optional<FirstKey> of_all;
    measure_.add(sums.first_token, ranks ? of_all.emplace(ctx, attention, s.attention, ranks) : own, seen);
    const AttentionGates& gates = attention.gates();
    for (size_t g = 0; g < sums.gates.size(); ++g)
      add_gate(ctx, sums.gates[g], gates.gate(g), gates.saved(s.attention.gates, g), own_starts);
    sums.importance_tokens +=
        add_importance(ctx, sums.importance, attention.head_gate(s.attention, batch.first_key), seen, mine);
    add_outputs(ctx, sums, s.attention, own);
    if (!ctx.dry_run) add_value_norms(ctx, sums, s.attention.gates[GatePosition::value].y, starts, ranks);
    raise(sums.attention_output, largest_magnitude(ctx, s.attention_out.y, seen));
    raise(sums.attention_residual, largest_magnitude(ctx, s.x1, seen));
    raise(sums.ffn_output, largest_magnitude(ctx, s.ffn_out.y, seen));
    raise(sums.ffn_residual, largest_magnitude(ctx, s.y, seen));
    for (const Tensor& residual : {s.x1, s.y})
      raise(sums.residual, largest_of_queries(ctx, residual, seen, ranks));
    if (attention.sparse() && !model_->dense_warm_up())
      add_selection(ctx, sums.selection, attention, s.attention,
                    l > 0 ? &saved.blocks[l - 1].attention : nullptr, batch.first_key, seen, ranks);
  }
  if (ctx.dry_run) return;
  ++sequences;
  tokens += static_cast<double>(starts.size());
  first_tokens += static_cast<double>(std::count(starts.begin(), starts.end(), true));
}

Parts Statistics::parts() {
  Parts parts;
  for (double* x : {&sequences, &tokens, &first_tokens}) add_part(parts, Merge::sum, *x);
  queries.add_parts(parts);
  for (LayerSums& l : layers) {
    l.first_token.add_parts(parts);
    add_part(parts, Merge::sum, l.value_norms);
    add_part(parts, Merge::sum, l.first_value_norms);
    for (double* x : {&l.residual.first, &l.residual.rest}) add_part(parts, Merge::largest, *x);
    l.selection.add_parts(parts);
    add_token_parts(parts, l);
  }
  return parts;
}

void Statistics::merge_tokens() {
  Parts parts;
  for (LayerSums& l : layers) add_token_parts(parts, l);
  sluice::merge_tokens(model_->sequence_ranks(), parts);
}

void Statistics::merge(Statistics& other) {
  const Parts from = other.parts();
  std::vector<double> packed(static_cast<size_t>(packed_size(from)));
  pack(packed.data(), from);
  merge_packed(parts(), packed.data());
}

SecondPass::SecondPass(const Statistics& first) : layers(first.layers.size()), model_(&first.model()) {
  const double infinity = std::numeric_limits<double>::infinity();
  double sum = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    const AttentionGates& gates = model_->blocks()[l].attention().gates();
    edges_.resize(gates.size(), {infinity, -infinity});
    layers[l].bins.resize(gates.size());
    std::optional<double> mean;
    for (size_t g = 0; g < gates.size(); ++g) {
      const GateSums& sums = first.layers[l].gates[g];
      edges_[g] = {std::min(edges_[g].first, sums.least), std::max(edges_[g].second, sums.largest)};
      if (!score_range(gates.gate(g).config().activation)) {
        needed_ = true;
        layers[l].bins[g].assign(kFineBins, 0);
      }
      const GateConfig& config = gates.gate(g).config();
      if (config.position == GatePosition::sdpa_output && config.combine == GateCombine::multiply)
        mean = mean.value_or(1) * sums.sum / std::max(sums.count, 1.0);
    }
    mean_gate_.push_back(mean);
    if (!mean) continue;
    needed_ = true;
    sum += *mean;
    mean_gate_of_all_ = sum / static_cast<double>(layers.size());
  }
}

void SecondPass::add(Context& ctx, const Transformer::Saved& saved) {
  SLUICE_CHECK(saved.recompute != Recompute::block, "SecondPass: the layers' activations share memory");
  for (size_t l = 0; l < layers.size(); ++l) {
    const Attention& attention = model_->blocks()[l].attention();
    const Attention::Saved& s = saved.blocks[l].attention;
    for (size_t g = 0; g < layers[l].bins.size(); ++g) {
      std::vector<double>& bins = layers[l].bins[g];
      if (bins.empty()) continue;
      for_each_score_row(ctx, attention.gates().gate(g), attention.gates().saved(s.gates, g), s.core.o.dim(0),
                         [&](int64_t, const double* scores, int64_t width) {
                           for (int64_t i = 0; i < width; ++i)
                             ++bins[bin_of(scores[i], edges_[g].first, edges_[g].second)];
                         });
    }
    if (!mean_gate_[l]) continue;
    const std::vector<double> before = output_before_gates(ctx, s, FirstKey(ctx, attention, s));
    if (ctx.dry_run) continue;
    for (size_t i = 0; i < kThresholds.size(); ++i) {
      layers[l].small_scaled[i] += count_below(before, std::abs(*mean_gate_[l]), kThresholds[i]);
      layers[l].small_scaled_by_all[i] += count_below(before, std::abs(*mean_gate_of_all_), kThresholds[i]);
    }
  }
}

void SecondPass::merge_tokens() { sluice::merge_tokens(model_->sequence_ranks(), parts()); }

Parts SecondPass::parts() {
  Parts parts;
  for (Layer& layer : layers) {
    for (std::vector<double>& bins : layer.bins) add_part(parts, Merge::sum, bins);
    for (auto* x : {&layer.small_scaled, &layer.small_scaled_by_all})
      parts.push_back({Merge::sum, x->data(), std::ssize(*x)});
  }
  return parts;
}

}  // namespace sluice
