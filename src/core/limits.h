#pragma once
// How much memory and disk space this process may use, and which limit says so.
#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

/// One limit on memory that is not yet taken.
struct MemoryLimit {
  std::string
      name;  // "the machine's available memory", "cgroup limit of 400.0 MiB (/sys/fs/cgroup/a/memory.max)"
  int64_t free = 0;    // bytes that may still be taken
  bool shared = true;  // by the processes of the machine, or of the group; otherwise this process's alone
  bool own_group = false;
  bool address_space = false;  // counts addresses, not memory: stacks of threads in full, mapped files
};

/// Every limit that holds for this process: available memory, control groups, ulimit -v and -d. `root` stands
/// before the paths of /proc and /sys, for tests.
std::vector<MemoryLimit> memory_limits(const std::string& root = "");

/// Bytes that an unprivileged process may still write to the file system that `path` is on, or will be.
int64_t free_disk_bytes(const std::string& path);

/// "1.21 GiB", "80.0 MiB", "3.4 KiB".
std::string bytes_text(int64_t bytes);

}  // namespace sluice
