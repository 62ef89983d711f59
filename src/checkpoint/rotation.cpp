#include "checkpoint/rotation.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "checkpoint/store.h"
#include "core/io.h"

namespace sluice {
namespace {

/// What an interrupted save can leave; other names are the user's.
bool is_litter(const std::string& name) {
  return name.starts_with(kStagingPrefix) || name.starts_with(kTrashPrefix) || name == "LATEST.tmp";
}

bool is_valid(const std::string& path) {
  try {
    verify_checkpoint(path);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::string step_folder_name(int64_t step) { return fmt::format("step_{:08}", step); }

int64_t step_of_folder_name(const std::string& name) {
  const bool digits = name.size() >= 13 && name.size() <= 23 && name.rfind("step_", 0) == 0 &&
                      std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; });
  const int64_t step = digits ? std::stoll(name.substr(5)) : -1;
  return step >= 0 && step_folder_name(step) == name ? step : -1;
}

void remove_litter(const std::string& folder, const std::string& except) {
  if (io::is_link(folder)) return;
  for (const std::string& name : io::list_directory(folder)) {
    if (!is_litter(name) || name == except) continue;
    try {
      io::remove_tree(folder + "/" + name);
    } catch (const Error& error) {
      spdlog::warn("left by an interrupted save: {}", error.what());
    }
  }
}

std::vector<std::string> rotate_checkpoints(const std::string& folder, int64_t keep_last,
                                            int64_t keep_every_steps, const std::string& newest,
                                            std::map<std::string, bool>& valid) {
  std::vector<std::string> old;
  int64_t kept = 0;
  for (const std::string& path : list_checkpoints(folder)) {
    if (kept >= std::max<int64_t>(keep_last, 1)) {
      const int64_t step = step_of_folder_name(path.substr(path.rfind('/') + 1));
      if (path != newest && (keep_every_steps <= 0 || step % keep_every_steps != 0)) old.push_back(path);
      continue;
    }
    const auto known = valid.find(path);
    const bool good = known != valid.end() ? known->second : (valid[path] = is_valid(path));
    if (!good) spdlog::warn("{} is damaged and does not count as a checkpoint to keep", path);
    kept += good;
  }
  // All renames are durable before any data is removed, so a crash leaves only complete checkpoints and
  // leftovers.
  std::vector<std::string> trash;
  for (const std::string& path : old) {
    trash.push_back(folder + "/" + kTrashPrefix + path.substr(path.rfind('/') + 1));
    io::remove_tree(trash.back());
    io::rename(path, trash.back());
    valid.erase(path);
  }
  if (!trash.empty()) io::fsync_directory(folder);
  for (const std::string& path : trash) io::remove_tree(path);
  return old;
}

std::vector<std::string> prune_checkpoints(const std::string& folder, int64_t keep_last,
                                           int64_t keep_every_steps) {
  std::map<std::string, bool> valid;
  return rotate_checkpoints(folder, keep_last, keep_every_steps, "", valid);
}

}  // namespace sluice
