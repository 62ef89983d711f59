#include "train/agree.h"

#include <vector>

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

}  // namespace sluice
