#include "analysis/selection.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "analysis/reading.h"

namespace sluice {
namespace {

/// The keys of query t in [first, t] that the selection contains.
std::vector<int64_t> keys_of(const Selection& selection, int64_t set, int64_t t, int64_t first) {
  std::vector<int64_t> keys;
  for (int64_t j = first; j <= t; ++j)
    if (selection.contains(set, t, j)) keys.push_back(j);
  return keys;
}

/// Dense attention of query t on keys [first, t], mean over heads [head, head + heads).
std::vector<double> dense_attention(const std::vector<double>& q, const std::vector<double>& k,
                                    const Attention::Saved& s, double scale, int64_t t, int64_t first,
                                    int64_t head, int64_t heads) {
  const int64_t H = s.q_position.y.dim(1), Hkv = s.k_position.y.dim(1), D = s.q_position.y.dim(2);
  std::vector<double> mean(static_cast<size_t>(t - first + 1)), z(mean.size());
  for (int64_t h = head; h < head + heads; ++h) {
    const double* const query = q.data() + (t * H + h) * D;
    for (int64_t j = first; j <= t; ++j) {
      const double* const key = k.data() + (j * Hkv + h / (H / Hkv)) * D;
      z[static_cast<size_t>(j - first)] = scale * std::inner_product(query, query + D, key, 0.0);
    }
    const double top = *std::max_element(z.begin(), z.end());
    double sum = 0;
    for (double& x : z) sum += x = std::exp(x - top);
    for (size_t i = 0; i < z.size(); ++i) mean[i] += z[i] / sum / static_cast<double>(heads);
  }
  return mean;
}

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

/// |union of the keys of kNeighbours queries up to t| over their mean number.
double union_ratio(const Selection& selection, int64_t set, int64_t t, int64_t first) {
  double total = 0;
  std::vector<int64_t> all;
  for (int64_t u = t - SelectionSums::kNeighbours + 1; u <= t; ++u) {
    const std::vector<int64_t> keys = keys_of(selection, set, u, first);
    total += static_cast<double>(keys.size());
    all.insert(all.end(), keys.begin(), keys.end());
  }
  std::sort(all.begin(), all.end());
  const auto unique = std::unique(all.begin(), all.end()) - all.begin();
  return static_cast<double>(unique) * SelectionSums::kNeighbours / total;
}

}  // namespace

SelectionSummary means_of(const SelectionSums& sums) {
  SelectionSummary m;
  if (sums.queries == 0) return m;
  m.mass = sums.mass / sums.queries, m.top = sums.top / sums.queries, m.keys = sums.keys / sums.queries;
  m.overlap = sums.overlap / sums.queries;
  if (sums.union_queries > 0) m.union_ratio = sums.union_ratio / sums.union_queries;
  return m;
}

void add_selection(Context& ctx, SelectionSums& sums, const Attention& attention, const Attention::Saved& s,
                   const Attention::Saved* before, const Tensor& first_key) {
  const std::vector<double> q = read_values(ctx, s.q_position.y), k = read_values(ctx, s.k_position.y);
  if (ctx.dry_run) return;
  const Selection& selection = s.core.selection;
  const int64_t T = s.q_position.y.dim(0), H = s.q_position.y.dim(1), sets = selection.first.dim(0);
  const int64_t step = std::max<int64_t>(T / SelectionSums::kLookedAt, 1);
  for (int64_t t = step - 1; t < T; t += step)
    for (int64_t set = 0; set < sets; ++set) {
      const int64_t first = first_key.as<int32_t>()[t];
      const std::vector<int64_t> keys = keys_of(selection, set, t, first);
      const std::vector<double> dense =
          dense_attention(q, k, s, attention.scale(), t, first, set * (H / sets), H / sets);
      const auto count = static_cast<double>(keys.size());
      sums.queries += 1;
      sums.keys += count;
      for (const int64_t j : keys) {
        sums.mass += dense[static_cast<size_t>(j - first)];
        if (before) sums.overlap += before->core.selection.contains(set, t, j) / count;
      }
      sums.top += static_cast<double>(hits(dense, keys, first)) / count;
      if (t - first + 1 < SelectionSums::kNeighbours) continue;
      sums.union_queries += 1;
      sums.union_ratio += union_ratio(selection, set, t, first);
    }
}

}  // namespace sluice
