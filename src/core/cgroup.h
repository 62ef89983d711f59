#pragma once
// What control groups (v1 and v2) allow this process: memory and CPU time, over all groups that it is in.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace sluice {

/// One control group with a memory limit.
struct MemoryGroup {
  std::string file;   // that states the limit
  int64_t limit = 0;  // bytes
  int64_t used = 0;   // bytes, without file cache, which the kernel gives up
  bool own = false;   // the process's own group; otherwise one above it
  int64_t free() const { return limit > used ? limit - used : 0; }
};

/// Memory limits from the process's own group upwards, those that are set and can be seen. `root` stands
/// before every path, for tests: its proc/self/cgroup and proc/self/mountinfo say where the groups are.
std::vector<MemoryGroup> memory_groups(const std::string& root = "");

/// Cores' worth of CPU time that the groups allow, the least of all; nothing where there is no quota.
std::optional<double> cpu_quota(const std::string& root = "");

}  // namespace sluice
