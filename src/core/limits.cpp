#include "core/limits.h"

#include <spdlog/fmt/fmt.h>
#include <sys/resource.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include "core/cgroup.h"
#include "core/io.h"

namespace sluice {
namespace {

/// The value, in bytes, of a line "NAME: N kB"; -1 if there is none.
int64_t kib_line(const std::string& path, const std::string& name) {
  if (!io::exists(path)) return -1;
  std::istringstream lines(io::read_file(path, 1 << 20));
  for (std::string line; std::getline(lines, line);)
    if (line.compare(0, name.size() + 1, name + ":") == 0)
      return 1024 * std::stoll("0" + line.substr(line.find_first_of("0123456789")));
  return -1;
}

void add_ulimit(std::vector<MemoryLimit>& limits, int resource, const char* name, int64_t taken) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
      taken < 0)
    return;
  const auto bytes =
      static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, std::numeric_limits<int64_t>::max()));
  limits.push_back({.name = fmt::format("{} of {}", name, bytes_text(bytes)),
                    .free = std::max<int64_t>(bytes - taken, 0),
                    .shared = false,
                    .address_space = true});
}

}  // namespace

std::string bytes_text(int64_t n) {
  const double x = static_cast<double>(n);
  if (n >= int64_t{1} << 30) return fmt::format("{:.2f} GiB", x / (1 << 30));
  if (n >= 1 << 20) return fmt::format("{:.1f} MiB", x / (1 << 20));
  return fmt::format("{:.1f} KiB", x / 1024);
}

std::vector<MemoryLimit> memory_limits(const std::string& root) {
  std::vector<MemoryLimit> limits;
  if (const int64_t available = kib_line(root + "/proc/meminfo", "MemAvailable"); available >= 0)
    limits.push_back({.name = "the machine's available memory", .free = available});
  for (const MemoryGroup& group : memory_groups(root))
    limits.push_back(
        {.name = fmt::format("the control group's limit of {} ({})", bytes_text(group.limit), group.file),
         .free = group.free(),
         .own_group = group.own});
  add_ulimit(limits, RLIMIT_AS, "ulimit -v", kib_line("/proc/self/status", "VmSize"));
  add_ulimit(limits, RLIMIT_DATA, "ulimit -d", kib_line("/proc/self/status", "VmData"));
  return limits;
}

int64_t free_disk_bytes(const std::string& path) {
  std::string existing = path.empty() ? "." : path;
  while (!io::exists(existing)) {
    const size_t slash = existing.find_last_of('/');
    existing = slash == std::string::npos ? "." : slash == 0 ? "/" : existing.substr(0, slash);
  }
  return io::free_bytes(existing);
}

}  // namespace sluice
