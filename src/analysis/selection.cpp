#include "analysis/selection.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "analysis/reading.h"
#include "analysis/whole_rows.h"

namespace sluice {
namespace {

/// The queries that are looked at and their neighbours before them, counted among the tokens of all ranks.
/// They depend on their sequence alone, not on what else is in the pass.
struct LookedAt {
  std::vector<int64_t> tokens, queries;  // ascending; queries: of tokens, those that are looked at
  std::vector<int64_t> first;            // the first visible key of each of tokens

  LookedAt(const Tensor& first_key, const Queries& counted, const SequenceRanks* ranks) {
    for (const auto& [begin, size] : counted.sequences) {
      const int64_t count = std::min(size, SelectionSums::kLookedAt);
      for (int64_t i = 1; i <= count; ++i) {
        const int64_t t = begin + i * size / count - 1;
        int64_t u = std::max(begin, t - SelectionSums::kNeighbours + 1);
        if (!tokens.empty()) u = std::max(u, tokens.back() + 1);
        for (; u <= t; ++u) tokens.push_back(u);
        queries.push_back(std::ssize(tokens) - 1);
      }
    }
    first = first_keys_of(first_key, tokens, ranks);
  }
};

/// The keys in [first, t] that row `row` of the selection, of query t, contains.
std::vector<int64_t> keys_of(const Selection& selection, int64_t set, int64_t row, int64_t t, int64_t first) {
  std::vector<int64_t> keys;
  for (int64_t j = first; j <= t; ++j)
    if (selection.contains(set, row, j)) keys.push_back(j);
  return keys;
}

/// Attention of a query, row `row` of q, on keys [first, t], mean over the heads of an index set: on all of
/// these keys, and on the selected ones alone.
struct MeanAttention {
  std::vector<double> dense, selected;
};
MeanAttention attention_of(const std::vector<double>& q, const std::vector<double>& k,
                           const Attention::Saved& s, double scale, const std::vector<int64_t>& keys,
                           int64_t row, int64_t t, int64_t first, int64_t head, int64_t heads) {
  const int64_t H = s.q_position.y.dim(1), Hkv = s.k_position.y.dim(1), D = s.q_position.y.dim(2);
  const auto n = static_cast<size_t>(t - first + 1);
  MeanAttention mean{std::vector<double>(n), std::vector<double>(n)};
  std::vector<double> z(n);
  for (int64_t h = head; h < head + heads; ++h) {
    const double* const query = q.data() + (row * H + h) * D;
    for (int64_t j = first; j <= t; ++j) {
      const double* const key = k.data() + (j * Hkv + h / (H / Hkv)) * D;
      z[static_cast<size_t>(j - first)] = scale * std::inner_product(query, query + D, key, 0.0);
    }
    const double top = *std::max_element(z.begin(), z.end());
    double sum = 0, selected = 0;
    for (double& x : z) sum += x = std::exp(x - top);
    for (const int64_t j : keys) selected += z[static_cast<size_t>(j - first)];
    for (size_t i = 0; i < n; ++i) mean.dense[i] += z[i] / sum / static_cast<double>(heads);
    for (const int64_t j : keys) {
      const auto i = static_cast<size_t>(j - first);
      mean.selected[i] += z[i] / selected / static_cast<double>(heads);
    }
  }
  return mean;
}

/// The indexer's scores (ops/indexer.h) and the divergence of their softmax from attention, of one layer.
class IndexScores {
 public:
  IndexScores(Context& ctx, const Indexer& indexer, const Attention::Saved& s, const Tensor& keys,
              const Tensor& first_key)
      : in_(indexer.inputs(s.core.index, keys, first_key)),
        temperature_(ctx.dry_run ? 1 : indexer.temperature(ctx)),
        q_(read_values(ctx, in_.q)),
        k_(read_values(ctx, in_.k)),
        w_(read_values(ctx, in_.w)),
        bias_(read_values(ctx, in_.bias)),
        w_bias_(read_values(ctx, in_.w_bias)) {}
  /// Keeps the queries of these tokens alone.
  void take(const SequenceRanks* ranks, const std::vector<int64_t>& tokens) {
    q_ = rows_of_tokens(ranks, tokens, q_.data(), in_.q.dim(1) * in_.q.dim(2));
    if (!w_.empty()) w_ = rows_of_tokens(ranks, tokens, w_.data(), in_.q.dim(1));
  }

  /// KL(attention || softmax of the scores) over the scored blocks of the query of this row, where attention
  /// is on the keys from `first` on. 0 without any.
  double divergence(const Selection& selection, int64_t set, int64_t row,
                    const std::vector<double>& attention, int64_t first) const {
    const int64_t at = set * selection.first.dim(1) + row, block = selection.block;
    const int32_t* const blocks = selection.first.as<int32_t>() + at * selection.first.dim(2);
    const int64_t n = selection.count.as<int32_t>()[at] - (block > 1);  // the own block has no score
    std::vector<double> p, scores;
    for (int64_t e = 0; e < n; ++e) {
      const auto begin = attention.begin() + (blocks[e] - first);
      p.push_back(std::accumulate(begin, begin + block, 0.0));
      scores.push_back(temperature_ * score(set, row, blocks[e]));
    }
    const double mass = std::accumulate(p.begin(), p.end(), 0.0);
    if (!(mass > 0)) return 0;
    const double top = *std::max_element(scores.begin(), scores.end());
    double sum = 0, divergence = 0;
    for (const double x : scores) sum += std::exp(x - top);
    for (size_t e = 0; e < p.size(); ++e)
      if (p[e] > 0) divergence += p[e] / mass * (std::log(p[e] / mass) - (scores[e] - top - std::log(sum)));
    return divergence;
  }

 private:
  double score(int64_t set, int64_t row, int64_t key) const {
    const int64_t J = in_.q.dim(1), d = in_.q.dim(2), per_set = J / in_.sets;
    const double* const k = k_.data() + key * d;
    double sum = 0;
    for (int64_t j = set * per_set; j < (set + 1) * per_set; ++j) {
      const double* const q = q_.data() + (row * J + j) * d;
      const double u = in_.scale * std::inner_product(q, q + d, k, 0.0) + at(bias_, j);
      const double weight = w_.empty() ? 1 : w_[static_cast<size_t>(row * J + j)] + at(w_bias_, j);
      sum += (in_.head_weights == IndexHeadWeights::sigmoid ? 1 / (1 + std::exp(-weight)) : weight) *
             (in_.activation == IndexActivation::sigmoid ? 1 / (1 + std::exp(-u)) : std::max(u, 0.0));
    }
    return sum;
  }
  static double at(const std::vector<double>& x, int64_t j) {
    return x.empty() ? 0 : x[static_cast<size_t>(j)];
  }

  IndexInputs in_;
  double temperature_;
  std::vector<double> q_, k_, w_, bias_, w_bias_;
};

/// How many of the keys with most attention, as many as `keys`, are among them; ties to the last key.
int64_t hits(const std::vector<double>& attention, const std::vector<int64_t>& keys, int64_t first) {
  std::vector<int64_t> order(attention.size());
  std::iota(order.rbegin(), order.rend(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return attention[static_cast<size_t>(a)] > attention[static_cast<size_t>(b)];
  });
  return std::count_if(order.begin(), order.begin() + std::ssize(keys),
                       [&](int64_t i) { return std::binary_search(keys.begin(), keys.end(), first + i); });
}

}  // namespace

double union_over_keys(const Selection& selection, int64_t set, int64_t row, int64_t t, int64_t first) {
  double total = 0;
  std::vector<int64_t> all;
  for (int64_t i = 1 - SelectionSums::kNeighbours; i <= 0; ++i) {
    const std::vector<int64_t> keys = keys_of(selection, set, row + i, t + i, first);
    total += static_cast<double>(keys.size());
    all.insert(all.end(), keys.begin(), keys.end());
  }
  std::sort(all.begin(), all.end());
  const auto unique = std::unique(all.begin(), all.end()) - all.begin();
  return static_cast<double>(unique) * SelectionSums::kNeighbours / total;
}

void SelectionSums::add_parts(Parts& parts) {
  for (double* x : {&queries, &mass, &top, &keys, &keys_squares, &divergence, &union_queries, &union_ratio,
                    &overlap_queries, &overlap})
    add_part(parts, Merge::sum, *x);
  add_part(parts, Merge::smallest, keys_least);
  add_part(parts, Merge::largest, keys_most);
}

SelectionSummary means_of(const SelectionSums& sums) {
  SelectionSummary m;
  if (sums.queries == 0) return m;
  m.mass = sums.mass / sums.queries, m.top = sums.top / sums.queries, m.keys = sums.keys / sums.queries;
  m.keys_deviation = std::sqrt(std::max(0.0, sums.keys_squares / sums.queries - m.keys * m.keys));
  m.keys_least = sums.keys_least, m.keys_most = sums.keys_most;
  m.divergence = sums.divergence / sums.queries;
  m.overlap = sums.overlap / sums.overlap_queries;  // 0 / 0 = NaN is intended, here and below
  m.union_ratio = sums.union_ratio / sums.union_queries;
  return m;
}

SelectedRows::SelectedRows(const Selection& all, const std::vector<int64_t>& tokens,
                           const SequenceRanks* ranks) {
  const int64_t sets = all.first.dim(0), T = all.first.dim(1), room = all.first.dim(2),
                rows = std::ssize(tokens);
  const auto append = [&](std::vector<int32_t>& to, const Tensor& from, int64_t set, int64_t width) {
    const auto of_set = rows_of_tokens(ranks, tokens, from.as<int32_t>() + set * T * width, width);
    to.insert(to.end(), of_set.begin(), of_set.end());
  };
  for (int64_t set = 0; set < sets; ++set)
    append(first_, all.first, set, room), append(count_, all.count, set, 1);
  first = Tensor(first_.data(), DType::i32, {sets, rows, room});
  count = Tensor(count_.data(), DType::i32, {sets, rows});
  block = all.block;
}

void add_selection(Context& ctx, SelectionSums& sums, const Attention& attention, const Attention::Saved& s,
                   const Attention::Saved* before, const Tensor& first_key, const Queries& queries,
                   const SequenceRanks* ranks) {
  ScratchScope scratch(ctx.scratch);
  const int64_t H = s.q_position.y.dim(1), D = s.q_position.y.dim(2), Hkv = s.k_position.y.dim(1);
  std::vector<double> q = read_values(ctx, s.q_position.y);
  const std::vector<double> k = whole_rows(ctx, ranks, read_values(ctx, s.k_position.y), Hkv * D);
  const Indexer& indexer = attention.sparse()->indexer();
  IndexScores scores(ctx, indexer, s, indexer.keys(ctx, scratch, ranks, first_key, s.core.index).means,
                     first_key);
  if (ctx.dry_run) return;
  const HostView first_keys(ctx, first_key);
  const HostSelection selected(ctx, s.core.selection);
  const LookedAt seen(first_keys.tensor(), queries, ranks);
  const SelectedRows selection(*selected, seen.tokens, ranks);
  std::optional<HostSelection> selected_before;
  std::optional<SelectedRows> of_layer_before;
  if (before) {
    selected_before.emplace(ctx, before->core.selection);
    of_layer_before.emplace(**selected_before, seen.tokens, ranks);
  }
  q = rows_of_tokens(ranks, seen.tokens, q.data(), H * D);
  scores.take(ranks, seen.tokens);
  const int64_t sets = selection.first.dim(0);
  for (const int64_t row : seen.queries)
    for (int64_t set = 0; set < sets; ++set) {
      const int64_t t = seen.tokens[static_cast<size_t>(row)], first = seen.first[static_cast<size_t>(row)];
      const std::vector<int64_t> keys = keys_of(selection, set, row, t, first);
      const MeanAttention on =
          attention_of(q, k, s, attention.scale(), keys, row, t, first, set * (H / sets), H / sets);
      const auto count = static_cast<double>(keys.size());
      sums.keys_least = std::min(sums.keys_least, count);
      sums.keys_most = std::max(sums.keys_most, count);
      sums.queries += 1;
      sums.keys += count;
      sums.keys_squares += count * count;
      if (before) sums.overlap_queries += 1;
      for (const int64_t j : keys) {
        sums.mass += on.dense[static_cast<size_t>(j - first)];
        if (before) sums.overlap += of_layer_before->contains(set, row, j) / count;
      }
      sums.top += static_cast<double>(hits(on.dense, keys, first)) / count;
      sums.divergence += scores.divergence(selection, set, row, on.selected, first);
      if (t - first + 1 < SelectionSums::kNeighbours) continue;
      sums.union_queries += 1;
      sums.union_ratio += union_over_keys(selection, set, row, t, first);
    }
}

}  // namespace sluice
