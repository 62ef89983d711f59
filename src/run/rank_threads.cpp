#include "run/rank_threads.h"

#include <spdlog/spdlog.h>
#include <xxhash.h>

#include <optional>
#include <utility>
#include <vector>

#include "core/cores.h"
#include "core/host.h"
#include "core/parallel_for.h"
#include "run/run_folder.h"

namespace sluice {

void use_threads(int64_t wanted, Communicator& ranks) {
  struct Place {
    uint64_t host, mask;
    int64_t allowed, threads;
    double quota;  // negative: none
  };
  const Cores cores = cores_of_process();
  const std::string host = host_name();
  Place mine{XXH3_64bits(host.data(), host.size()), cores.mask, cores.allowed, 0, cores.quota.value_or(-1)};
  std::vector<Place> all(static_cast<size_t>(ranks.size()));
  const auto gather = [&] { ranks.all_gather(all.data(), &mine, sizeof mine); };
  gather();
  const auto neighbours = [&](const Place& p) {
    std::pair<int, int> count{0, 0};  // with the same mask, on the same machine
    for (const Place& other : all) {
      count.first += other.host == p.host && other.mask == p.mask;
      count.second += other.host == p.host;
    }
    return count;
  };
  const auto [same_mask, together] = neighbours(mine);
  if (wanted > 0)
    set_num_threads(static_cast<int>(wanted));
  else if (threads_of_environment() == 0)
    set_num_threads(default_threads(cores, same_mask, together));
  mine.threads = num_threads();
  gather();
  if (ranks.rank() != 0) return;
  for (const Place& p : all) {
    const auto [same, on_machine] = neighbours(p);
    const Cores its{static_cast<int>(p.allowed), p.quota < 0 ? std::nullopt : std::optional<double>(p.quota),
                    p.mask};
    const std::string problem = too_many_threads(its, static_cast<int>(p.threads), same, on_machine);
    if (problem.empty()) continue;
    spdlog::warn("{}", problem);
    return;
  }
}

}  // namespace sluice
