#pragma once
// Limits of the control groups (v1 and v2) that this process is in: memory and CPU time.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace sluice {

/// One control group with a memory limit.
struct MemoryGroup {
  std::string file;   // the file that states the limit
  int64_t limit = 0;  // bytes
  int64_t used = 0;   // bytes, without file cache, which the kernel can reclaim
  bool own = false;   // the process's own group, not an ancestor
  int64_t free() const { return limit > used ? limit - used : 0; }
};

/// The memory limits of the process's own group and its visible ancestors, as far as they are set. `root` is
/// prepended to every path, for tests: its proc/self/cgroup and proc/self/mountinfo locate the groups.
std::vector<MemoryGroup> memory_groups(const std::string& root = "");

/// The smallest CPU quota of the groups, in cores; nothing if none is set.
std::optional<double> cpu_quota(const std::string& root = "");

}  // namespace sluice
