#include "comm/collective_errors.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <vector>

#include "core/host.h"

namespace sluice {

void broadcast_text(Communicator& ranks, std::string& text, int root) {
  int64_t size = std::ssize(text);
  ranks.broadcast(&size, sizeof(size), root);
  text.resize(static_cast<size_t>(size));
  if (size > 0) ranks.broadcast(text.data(), size, root);
}

std::string first_problem(Communicator& ranks, const std::string& mine) {
  if (ranks.size() == 1) return mine;
  std::vector<int64_t> sizes(static_cast<size_t>(ranks.size()));
  const int64_t size = std::ssize(mine);
  ranks.all_gather(sizes.data(), &size, sizeof(size));
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (sizes[static_cast<size_t>(rank)] == 0) continue;
    std::string text = mine;
    broadcast_text(ranks, text, rank);
    return fmt::format("rank {}: {}", rank, text);
  }
  return "";
}

std::vector<std::string> host_names(Communicator& ranks) {
  constexpr size_t kLength = 96;
  std::string mine = host_name(), all(kLength * static_cast<size_t>(ranks.size()), '\0');
  mine.resize(kLength, '\0');
  mine.back() = '\0';
  ranks.all_gather(all.data(), mine.data(), kLength);
  std::vector<std::string> hosts;
  for (int r = 0; r < ranks.size(); ++r) hosts.emplace_back(all.c_str() + kLength * static_cast<size_t>(r));
  return hosts;
}

std::string rank_ranges(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[i]);
    if (last > i) text += "-" + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string rank_text(const std::vector<int>& ranks, const std::vector<std::string>& hosts) {
  constexpr size_t kHosts = 4;
  std::vector<std::string> those;
  for (const int r : ranks)
    if (const std::string& host = hosts[static_cast<size_t>(r)];
        std::find(those.begin(), those.end(), host) == those.end())
      those.push_back(host);
  const size_t more = those.size() - std::min(those.size(), kHosts);
  const char* const plural = those.size() == 1 ? "" : "s";
  those.resize(those.size() - more);
  std::string text = fmt::format("{} {} (host{} {}", ranks.size() == 1 ? "rank" : "ranks", rank_ranges(ranks),
                                 plural, fmt::join(those, ", "));
  if (more > 0) text += fmt::format(" and {} more", more);
  return text + ")";
}

}  // namespace sluice
