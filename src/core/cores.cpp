#include "core/cores.h"

#include <sched.h>
#include <spdlog/fmt/fmt.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdlib>

#include "core/cgroup.h"
#include "core/parallel_for.h"

namespace sluice {

Cores cores_of_process() {
  Cores cores;
  constexpr int kMost = 1 << 14;
  cpu_set_t* set = CPU_ALLOC(kMost);
  const size_t size = CPU_ALLOC_SIZE(kMost);
  CPU_ZERO_S(size, set);
  if (set && sched_getaffinity(0, size, set) == 0) {
    cores.allowed = std::max(1, CPU_COUNT_S(size, set));
    cores.mask = XXH3_64bits(set, size);
  } else {
    cores.allowed = static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  }
  CPU_FREE(set);
  cores.quota = cpu_quota();
  return cores;
}

int default_threads(const Cores& cores, int same_mask, int ranks) {
  int threads = cores.allowed / std::max(same_mask, 1);
  if (cores.quota) threads = std::min(threads, static_cast<int>(*cores.quota / std::max(ranks, 1) + 1e-9));
  return std::max(threads, 1);
}

std::string too_many_threads(const Cores& cores, int threads, int same_mask, int ranks) {
  const std::string each = ranks > 1 ? fmt::format("{} ranks of this machine with {} thread{} each", ranks,
                                                   threads, threads == 1 ? "" : "s")
                                     : fmt::format("{} threads", threads);
  const int64_t on_mask = int64_t{threads} * same_mask;
  if (on_mask > cores.allowed && (threads > 1 || same_mask > 1))
    return fmt::format(
        "{} share {} core{} and wait for each other; fewer train.threads or ranks would be faster, or a "
        "launcher "
        "that binds the ranks elsewhere",
        same_mask == ranks ? each : fmt::format("{} threads", on_mask), cores.allowed,
        cores.allowed == 1 ? "" : "s");
  if (cores.quota && static_cast<double>(threads) * ranks > *cores.quota + 0.5 &&
      int64_t{threads} * ranks > 1)
    return fmt::format(
        "{} have a quota of {:.2f} cores (cgroup) and are throttled; fewer "
        "train.threads would "
        "be faster",
        each, *cores.quota);
  return "";
}

int threads_of_environment() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  return text ? std::max(std::atoi(text), 0) : 0;
}

void use_threads(int64_t wanted) {
  if (wanted > 0)
    set_num_threads(static_cast<int>(wanted));
  else if (threads_of_environment() == 0)
    set_num_threads(default_threads(cores_of_process()));
}

}  // namespace sluice
