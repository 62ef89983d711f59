#pragma once
// RUN/: the folder of one run (README.md). One process at a time owns it.
#include <atomic>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/repeated_warning.h"

namespace sluice {

class RunFolder {
 public:
  /// Creates the folder if it is missing and acquires its lock; Error(cannot_create) names the owner if
  /// another process holds it. The lock is released when the process ends, in whatever way.
  explicit RunFolder(std::string path);
  /// After a failed start, that is, one without keep(): removes what it created, which is either the folder
  /// and those of the parents it created that are empty, or the new files of a run in a folder that existed
  /// before.
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  /// Training starts: the content of the folder is kept.
  void keep() { kept_ = true; }

  /// Any thread may call.
  std::string path() const;
  std::string file(const std::string& name) const { return path() + "/" + name; }

  /// Replaces a file atomically. Error(cannot_create) if the folder no longer belongs to this run.
  void write(const std::string& name, const std::string& content) const;
  /// status.json: {state, step, tokens, ...} plus pid, host and heartbeat. A failure is a warning.
  void write_status(nlohmann::ordered_json status) const;

  /// Checks that the path still leads to the locked folder: it may have been renamed or removed, and another
  /// run may have been started under its name. Error(cannot_create) says which of these happened and where
  /// this run's folder is now. Any thread may call.
  void require_ours() const;
  /// If the folder was removed: creates and locks it again, and returns true. Returns false if path() exists.
  bool make_again();
  /// If the folder was renamed: uses its new name from now on, and returns true.
  bool follow();

 private:
  void take_lock();
  void take_back() const;
  bool ours() const;
  std::string renamed_to() const;
  void write_owner();

  mutable std::mutex following_;  // of path_, which changes while a save may be under way
  std::string path_, owner_;      // owner: the text in the lock about this process
  std::atomic<int> lock_ = -1;
  bool kept_ = false;
  std::vector<std::string> created_;  // for it: the folder, its parent, ...; empty: it existed
  std::vector<std::string> before_;  // its content at that time
  mutable RepeatedWarning status_warning_;
};

}  // namespace sluice
