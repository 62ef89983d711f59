#pragma once
// The folder RUN/ckpt: names of checkpoints, litter of interrupted saves, and which old ones go.
#include <map>
#include <string>
#include <vector>

namespace sluice {

constexpr const char* kStagingPrefix = ".staging-";
constexpr const char* kTrashPrefix = ".trash-";

std::string step_folder_name(int64_t step);  // step_00001200
/// The step of such a name, or -1.
int64_t step_of_folder_name(const std::string& name);

/// Removes what interrupted saves left, but for the name `except`. What cannot be removed is reported and
/// left.
void remove_litter(const std::string& folder, const std::string& except = "");

/// Removes checkpoints older than the newest keep_last valid ones, except `newest` and multiples of
/// keep_every_steps. `valid` remembers by path which ones were found valid or damaged; the others are
/// verified here, so that a damaged checkpoint never counts. Returns the removed paths.
std::vector<std::string> rotate_checkpoints(const std::string& folder, int64_t keep_last,
                                            int64_t keep_every_steps, const std::string& newest,
                                            std::map<std::string, bool>& valid);

}  // namespace sluice
