#include "analysis/queries.h"

#include <algorithm>

#include "core/host_view.h"

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

Queries::Queries(Context& ctx, const Batch& batch, const QueryClasses& classes) {
  const HostView token_view(ctx, batch.tokens), target_view(ctx, batch.targets),
      first_key_view(ctx, batch.first_key);
  if (ctx.dry_run) return;
  const int64_t T = batch.tokens.numel();
  const int32_t *tokens = token_view.tensor().as<int32_t>(), *targets = target_view.tensor().as<int32_t>(),
                *first_key = first_key_view.tensor().as<int32_t>();
  class_of.resize(static_cast<size_t>(T));
  std::transform(tokens, tokens + T, class_of.begin(), [&](int32_t token) { return classes.of(token); });
  for (int64_t begin = 0, end = 0; begin < T; begin = end) {
    while (end < T && first_key[end] == first_key[begin]) ++end;
    int64_t last = end;
    while (last > begin && targets[last - 1] < 0) --last;
    if (end - last < 2) last = end;  // one alone is the end of a document
    if (last > begin) sequences.push_back({begin, last - begin});
  }
}

}  // namespace sluice
