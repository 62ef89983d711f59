#include "analysis/first_token.h"

#include <algorithm>
#include <limits>

namespace sluice {

void QueryCounts::add_parts(Parts& parts) {
  for (double* x : {&all, &later, &leading}) add_part(parts, Merge::sum, *x);
  add_part(parts, Merge::sum, by_class);
}

void FirstTokenSums::add_parts(Parts& parts) {
  for (auto* x : {&all, &later, &by_class, &sink, &leading_sink}) add_part(parts, Merge::sum, *x);
}

QueryCounts FirstTokenMeasure::no_queries() const {
  QueryCounts counts;
  counts.by_class.assign(classes_.count(), 0);
  return counts;
}

FirstTokenSums FirstTokenMeasure::no_sums(int64_t heads) const {
  FirstTokenSums sums;
  const auto H = static_cast<size_t>(heads);
  for (auto* x : {&sums.all, &sums.later, &sums.sink, &sums.leading_sink}) x->assign(H, 0);
  sums.by_class.assign(classes_.count() * H, 0);
  return sums;
}

void FirstTokenMeasure::count(QueryCounts& counts, const Queries& queries) const {
  for (const Queries::Sequence& s : queries.sequences) {
    counts.all += static_cast<double>(s.size);
    counts.later += static_cast<double>(s.size - 1);
    counts.leading += static_cast<double>(std::min(s.size, length_));
    for (int64_t t = s.begin + 1; t < s.begin + s.size; ++t)
      ++counts.by_class[queries.class_of[static_cast<size_t>(t)]];
  }
}

void FirstTokenMeasure::add(FirstTokenSums& sums, const FirstKey& first_key, const Queries& queries) const {
  const auto H = static_cast<size_t>(first_key.heads());
  for (size_t h = 0; h < H; ++h)
    for (const Queries::Sequence& s : queries.sequences) {
      const int64_t leading = std::min(s.size, length_);
      double in_sequence = 0, in_leading = 0;
      for (int64_t i = 0; i < s.size; ++i) {
        const int64_t t = s.begin + i;
        const double attention = first_key.attention(static_cast<int64_t>(h), t);
        sums.all[h] += attention;
        in_sequence += attention;
        if (i < leading) in_leading += attention;
        if (i == 0) continue;
        sums.later[h] += attention;
        sums.by_class[queries.class_of[static_cast<size_t>(t)] * H + h] += attention;
      }
      const auto queries_of = static_cast<double>(s.size), leading_of = static_cast<double>(leading);
      if (in_sequence > threshold_ * queries_of) sums.sink[h] += queries_of;
      if (in_leading > threshold_ * leading_of) sums.leading_sink[h] += leading_of;
    }
}

HeadAttention FirstTokenMeasure::means(const FirstTokenSums& sums, const QueryCounts& counts) const {
  const size_t H = sums.all.size();
  // 0 / 0 = NaN is intended: no query was counted.
  const auto divided = [](std::vector<double> x, double count) {
    for (double& v : x) v /= count;
    return x;
  };
  HeadAttention means{.all = divided(sums.all, counts.all),
                      .later = divided(sums.later, counts.later),
                      .by_class = {},
                      .sink = divided(sums.sink, counts.all),
                      .leading_sink = divided(sums.leading_sink, counts.leading)};
  for (size_t c = 0; classes_.count() > 1 && c < classes_.count(); ++c) {
    const auto row = sums.by_class.begin() + static_cast<int64_t>(c * H);
    means.by_class.push_back(divided({row, row + static_cast<int64_t>(H)}, counts.by_class[c]));
  }
  return means;
}

SinkSummary FirstTokenMeasure::summary(const std::vector<HeadAttention>& layers) const {
  SinkSummary result;
  result.strongest = -1;
  for (size_t l = 0; l < layers.size(); ++l)
    for (size_t h = 0; h < layers[l].later.size(); ++h) {
      const HeadAttention& layer = layers[l];
      result.share += layer.sink[h];
      result.leading_share += layer.leading_sink[h];
      result.heads += layer.later[h] > threshold_;
      ++result.of;
      if (!(layer.later[h] > result.strongest)) continue;
      result.layer = l;
      result.head = h;
      result.strongest = layer.later[h];
    }
  result.share /= static_cast<double>(result.of);
  result.leading_share /= static_cast<double>(result.of);
  if (result.strongest < 0) {  // no head has a mean
    result.strongest = std::numeric_limits<double>::quiet_NaN();
    return result;
  }
  for (const std::vector<double>& of_class : layers[result.layer].by_class)
    result.strongest_by_class.push_back(of_class[result.head]);
  return result;
}

}  // namespace sluice
