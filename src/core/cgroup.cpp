#include "core/cgroup.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "core/io.h"

namespace sluice {
namespace {

/// The text of a small file; empty if it is absent or unreadable.
std::string text_of(const std::string& path) {
  try {
    return io::exists(path) ? io::read_file(path, 1 << 20) : "";
  } catch (const Error&) {
    return "";
  }
}

/// The number at the start of a file; nothing for "max" or an absent file.
std::optional<int64_t> number_in(const std::string& path) {
  int64_t value = 0;
  std::istringstream text(text_of(path));
  if (!(text >> value)) return std::nullopt;
  return value;
}

/// The value of a line "NAME VALUE", or 0.
int64_t value_of(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  std::string key;
  for (int64_t value = 0; lines >> key >> value;)
    if (key == name) return value;
  return 0;
}

/// Whether a comma-separated list contains a word.
bool lists(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

/// The folders of this process's groups of one controller, from its own group to the mount point of the
/// hierarchy.
std::vector<std::string> folders(const std::string& root, const std::string& controller, bool v2) {
  std::string path;  // of the process's own group, within the hierarchy
  std::istringstream groups(text_of(root + "/proc/self/cgroup"));
  for (std::string line; std::getline(groups, line);) {
    const size_t a = line.find(':'), b = a == std::string::npos ? a : line.find(':', a + 1);
    if (b == std::string::npos) continue;
    const std::string controllers = line.substr(a + 1, b - a - 1);
    if (v2 ? controllers.empty() && line.compare(0, a, "0") == 0 : lists(controllers, controller))
      path = line.substr(b + 1);
  }
  if (path.empty()) return {};

  std::istringstream mounts(text_of(root + "/proc/self/mountinfo"));
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string id, parent, device, of, at, word, type, source, options;
    fields >> id >> parent >> device >> of >> at;
    while (fields >> word && word != "-") {
    }
    fields >> type >> source >> options;
    if (v2 ? type != "cgroup2" : type != "cgroup" || !lists(options, controller)) continue;
    // A container sees its own group as the root of the mount; groups above it are invisible.
    std::string below = path == "/" ? "" : path;
    if (of != "/") {
      if (below == of)
        below.clear();
      else if (below.compare(0, of.size() + 1, of + "/") == 0)
        below = below.substr(of.size());
    }
    if (!io::is_directory(root + at + below)) below.clear();
    std::vector<std::string> chain;
    for (; !below.empty(); below = below.substr(0, below.rfind('/'))) chain.push_back(root + at + below);
    chain.push_back(root + at);
    return chain;
  }
  return {};
}

}  // namespace

std::vector<MemoryGroup> memory_groups(const std::string& root) {
  std::vector<MemoryGroup> groups;
  constexpr int64_t kUnlimited = int64_t{1}
                                 << 60;  // version 1 writes "no limit" as the largest number of whole pages
  for (const bool v2 : {true, false}) {
    const std::vector<std::string> chain = folders(root, "memory", v2);
    for (size_t i = 0; i < chain.size(); ++i) {
      const std::string file = chain[i] + (v2 ? "/memory.max" : "/memory.limit_in_bytes");
      const std::string statistics = text_of(chain[i] + "/memory.stat");
      std::optional<int64_t> limit = number_in(file);
      // Version 1 also reports the limits of invisible ancestors.
      if (const int64_t above = v2 ? 0 : value_of(statistics, "hierarchical_memory_limit");
          above > 0 && above < kUnlimited)
        limit = std::min(limit.value_or(above), above);
      if (!limit || *limit >= kUnlimited) continue;
      const int64_t used =
          number_in(chain[i] + (v2 ? "/memory.current" : "/memory.usage_in_bytes")).value_or(0);
      const std::string prefix = v2 ? "" : "total_";
      const int64_t cache = value_of(statistics, prefix + "active_file") +
                            value_of(statistics, prefix + "inactive_file") +
                            (v2 ? value_of(statistics, "slab_reclaimable") : 0);
      groups.push_back({file, *limit, std::max<int64_t>(used - cache, 0), i == 0});
    }
  }
  return groups;
}

std::optional<double> cpu_quota(const std::string& root) {
  std::optional<double> least;
  const auto take = [&](int64_t quota, int64_t period) {
    if (quota <= 0 || period <= 0) return;
    const double cores = static_cast<double>(quota) / static_cast<double>(period);
    least = std::min(least.value_or(cores), cores);
  };
  for (const std::string& folder : folders(root, "cpu", true)) {
    int64_t quota = 0, period = 0;
    std::istringstream text(text_of(folder + "/cpu.max"));
    if (text >> quota >> period) take(quota, period);  // "max 100000": no quota
  }
  for (const std::string& folder : folders(root, "cpu", false))
    take(number_in(folder + "/cpu.cfs_quota_us").value_or(0),
         number_in(folder + "/cpu.cfs_period_us").value_or(0));
  return least;
}

}  // namespace sluice
