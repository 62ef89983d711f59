#include "analysis/maps.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "analysis/pca.h"
#include "analysis/reading.h"
#include "analysis/selection.h"
#include "analysis/whole_rows.h"
#include "core/parallel_for.h"

namespace sluice {

AttentionMaps::AttentionMaps(const Transformer& model, int64_t tokens) : model_(&model), tokens_(tokens) {
  const auto layers = static_cast<size_t>(model.config().num_hidden_layers);
  queries_.heads = model.config().num_attention_heads;
  keys_.heads = model.config().num_key_value_heads;
  for (Points* points : {&queries_, &keys_})
    points->of_head.resize(layers * static_cast<size_t>(points->heads));
  sum_.assign(layers * static_cast<size_t>(tokens * tokens), 0);
  heads_.assign(sum_.size() * static_cast<size_t>(queries_.heads), 0);
}

/// values (M, heads, D)
void AttentionMaps::Points::add(int64_t layer, const std::vector<double>& values, int64_t head_dim) {
  for (size_t begin = 0, row = 0; begin < values.size(); begin += static_cast<size_t>(head_dim), ++row) {
    std::vector<double>& all = of_head[static_cast<size_t>(layer * heads) + row % static_cast<size_t>(heads)];
    all.insert(all.end(), values.begin() + static_cast<int64_t>(begin),
               values.begin() + static_cast<int64_t>(begin) + head_dim);
  }
}

void AttentionMaps::add(Context& ctx, const Tensor& first_key, const Transformer::Saved& saved) {
  SLUICE_CHECK(saved.recompute != Recompute::block, "AttentionMaps: the layers' activations share memory");
  const int64_t M = tokens_, H = queries_.heads, Hkv = keys_.heads, D = model_->config().head_dim;
  const SequenceRanks* const ranks = model_->sequence_ranks();
  check_tensor("AttentionMaps", "first_key", first_key, DType::i32, {ranks ? ranks->split().length() : M});
  std::vector<int64_t> tokens(static_cast<size_t>(M));
  std::iota(tokens.begin(), tokens.end(), 0);
  const auto first_rows = [&](const Tensor& t, int64_t width) {
    const std::vector<double> values = read_values(ctx, t);
    return ctx.dry_run ? values : rows_of_tokens(ranks, tokens, values.data(), width);
  };
  const HostView first_keys(ctx, first_key);
  const std::vector<int64_t> first = ctx.dry_run ? tokens : first_keys_of(first_keys.tensor(), tokens, ranks);
  for (size_t l = 0; l < saved.blocks.size(); ++l) {
    const Attention& attention = model_->blocks()[l].attention();
    const Attention::Saved& s = saved.blocks[l].attention;
    const auto layer = static_cast<int64_t>(l);
    const FirstKey rows(ctx, attention, s, ranks);
    const bool selects = attention.sparse() && !model_->dense_warm_up();
    const std::vector<double> q = first_rows(s.q_position.y, H * D), k = first_rows(s.k_position.y, Hkv * D),
                              lse = whole_statistics(ctx, ranks, read_values(ctx, s.core.lse), H);
    const HostSelection selected(ctx, s.core.selection);
    if (ctx.dry_run) continue;
    const int64_t T = rows.tokens();
    std::optional<SelectedRows> selection;
    if (selects) selection.emplace(*selected, tokens, ranks);
    const int64_t window = attention.softmax() ? attention.softmax()->window() : 0;
    const auto first_seen = [&](int64_t t) {
      const int64_t of_sequence = first[static_cast<size_t>(t)];
      return window > 0 ? std::max(of_sequence, t - window + 1) : of_sequence;
    };
    queries_.add(layer, q, D);
    keys_.add(layer, k, D);
    for (int64_t h = 0; h < H; ++h)
      for (int64_t t = 0; t < M; ++t)
        for (int64_t j = first_seen(t); j <= t; ++j) {
          if (selects && !selection->contains(h * selection->first.dim(0) / H, t, j)) continue;
          const double *query = q.data() + (t * H + h) * D, *key = k.data() + (j * Hkv + h / (H / Hkv)) * D;
          double dot = 0;
          for (int64_t d = 0; d < D; ++d) dot += query[d] * key[d];
          const double a = attention.weight(attention.scale() * dot, lse[static_cast<size_t>(h * T + t)]) *
                           rows.kept(h, t);
          sum_[static_cast<size_t>((layer * M + t) * M + j)] += a;
          if (sequences_ == 0)
            heads_[static_cast<size_t>(((layer * H + h) * M + t) * M + j)] = static_cast<float>(a);
        }
  }
  if (!ctx.dry_run) ++sequences_;
}

std::vector<float> AttentionMaps::mean() const {
  std::vector<float> mean(sum_.size());
  const auto count = static_cast<double>(queries_.heads * std::max<int64_t>(sequences_, 1));
  for (size_t i = 0; i < mean.size(); ++i) mean[i] = static_cast<float>(sum_[i] / count);
  return mean;
}

AttentionMaps::Planes AttentionMaps::planes(const Points& points) const {
  const int64_t D = model_->config().head_dim, rows = sequences_ * tokens_,
                heads = std::ssize(points.of_head);
  Planes planes{std::vector<float>(static_cast<size_t>(2 * heads * rows)),
                std::vector<double>(static_cast<size_t>(2 * heads))};
  parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Projection p = project_to_plane(points.of_head[static_cast<size_t>(i)].data(), rows, D);
      for (size_t j = 0; j < p.points.size(); ++j)
        planes.points[static_cast<size_t>(2 * i * rows) + j] = static_cast<float>(p.points[j]);
      for (size_t j = 0; j < 2; ++j) planes.explained[static_cast<size_t>(2 * i) + j] = p.explained[j];
    }
  });
  return planes;
}

AttentionMaps::Planes AttentionMaps::queries() const { return planes(queries_); }
AttentionMaps::Planes AttentionMaps::keys() const { return planes(keys_); }

}  // namespace sluice
