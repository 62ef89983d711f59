#pragma once
// How much memory and disk space this process may use, and by which limit.
#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

/// One limit on further memory.
struct MemoryLimit {
  std::string
      name;  // "the machine's available memory", "cgroup limit of 400.0 MiB (/sys/fs/cgroup/a/memory.max)"
  int64_t free = 0;    // bytes that may still be allocated
  bool shared = true;  // by all processes of the machine or group; otherwise it applies to this process alone
  bool own_group = false;
  bool address_space = false;  // counts address space, not memory: full thread stacks and mapped files
};

/// All memory limits of this process: available memory, control groups, ulimit -v and -d. `root` is prepended
/// to paths in /proc and /sys, for tests.
std::vector<MemoryLimit> memory_limits(const std::string& root = "");

/// Bytes that an unprivileged process may still write to the file system of `path`, which need not exist yet.
int64_t free_disk_bytes(const std::string& path);

/// "1.21 GiB", "80.0 MiB", "3.4 KiB".
std::string bytes_text(int64_t bytes);

}  // namespace sluice
