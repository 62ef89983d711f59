#pragma once
// The folder RUN/ckpt: names of checkpoints, leftovers of interrupted saves, and removal of old checkpoints.
#include <map>
#include <string>
#include <vector>

namespace sluice {

constexpr const char* kStagingPrefix = ".staging-";
constexpr const char* kTrashPrefix = ".trash-";

std::string step_folder_name(int64_t step);  // step_00001200
/// The step in such a name, or -1 for any other name.
int64_t step_of_folder_name(const std::string& name);

/// Removes leftovers of interrupted saves except the one named `except`. What cannot be removed is reported
/// and remains. Nothing is removed where the folder is a symbolic link.
void remove_litter(const std::string& folder, const std::string& except = "");

/// Removes checkpoints older than the newest keep_last valid ones, except `newest` and multiples of
/// keep_every_steps. `valid` caches, by path, which checkpoints are valid; others are verified here, so that
/// a damaged checkpoint is never counted. Returns the removed paths.
std::vector<std::string> rotate_checkpoints(const std::string& folder, int64_t keep_last,
                                            int64_t keep_every_steps, const std::string& newest,
                                            std::map<std::string, bool>& valid);

}  // namespace sluice
