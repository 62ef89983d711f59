#include "analysis/queries.h"

#include <algorithm>
#include <utility>

#include "analysis/whole_rows.h"
#include "core/host_view.h"
#include "core/targets.h"

namespace sluice {

QueryClasses::QueryClasses(const std::vector<QueryClassConfig>& config) {
  const size_t other = config.size();
  for (size_t i = 0; i < config.size(); ++i) {
    names_.push_back(config[i].name);
    for (const int64_t token : config[i].tokens) {
      const auto id = static_cast<size_t>(token);
      if (id >= class_of_.size()) class_of_.resize(id + 1, other);
      class_of_[id] = i;
    }
  }
  names_.emplace_back("other");
}

Queries::Queries(Context& ctx, const Batch& batch, const QueryClasses& classes, const SequenceRanks* ranks) {
  const HostView token_view(ctx, batch.tokens), target_view(ctx, batch.targets),
      first_key_view(ctx, batch.first_key);
  const int64_t mine = batch.tokens.numel();
  if (ctx.dry_run) {
    rows = {{0, mine}}, count = mine;
    return;
  }
  std::vector<double> read;  // token, target, and how far before it the first key is
  for (int64_t t = 0; t < mine; ++t) {
    read.push_back(token_view.tensor().as<int32_t>()[t]);
    read.push_back(target_view.tensor().as<int32_t>()[t]);
    read.push_back(static_cast<double>(t - first_key_view.tensor().as<int32_t>()[t]));
  }
  read = whole_rows(ctx, ranks, std::move(read), 3);
  const int64_t T = std::ssize(read) / 3;
  const auto value = [&](int64_t t, int64_t i) { return read[static_cast<size_t>(3 * t + i)]; };
  const auto first_key = [&](int64_t t) { return t - static_cast<int64_t>(value(t, 2)); };
  for (int64_t t = 0; t < T; ++t) class_of.push_back(classes.of(static_cast<int32_t>(value(t, 0))));
  for (int64_t begin = 0, end = 0; begin < T; begin = end) {
    while (end < T && first_key(end) == first_key(begin)) ++end;
    int64_t last = end;
    while (last > begin && value(last - 1, 1) == kPadding) --last;
    if (last > begin) sequences.push_back({begin, last - begin});
  }
  std::vector<bool> counted(static_cast<size_t>(T));
  for (const Sequence& sequence : sequences)
    std::fill_n(counted.begin() + sequence.begin, sequence.size, true);
  for (int64_t t = 0; t < mine; ++t) {
    if (!counted[static_cast<size_t>(ranks ? ranks->split().token_of(t) : t)]) continue;
    if (rows.empty() || rows.back().begin + rows.back().size != t) rows.push_back({t, 0});
    ++rows.back().size, ++count;
  }
}

}  // namespace sluice
