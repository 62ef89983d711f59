#pragma once
// RUN/: one training on disk (README.md). One process at a time owns it.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/repeated_warning.h"

namespace sluice {

class RunFolder {
 public:
  /// Creates the folder if it is missing and takes its lock; Error(cannot_create) names the owner when
  /// another process has it. The lock ends with the process, however that ends.
  explicit RunFolder(std::string path);
  /// Of a start that failed, which is one without keep(): takes back what it has made. A folder that it has
  /// created goes, with the folders above that it has created; from a folder that was there go the files of a
  /// run that were not.
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  /// The training begins: what is in the folder stays.
  void keep() { kept_ = true; }

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

  /// Replaces a file as a whole. Error(cannot_create) where the folder is no longer this training's.
  void write(const std::string& name, const std::string& content) const;
  /// status.json: {state, step, tokens, ...} plus pid, host and heartbeat. A failure is a warning.
  void write_status(nlohmann::ordered_json status) const;

  /// The lock holds on to a folder, the path may meanwhile lead elsewhere: the folder was renamed or removed,
  /// and another training may have been started under its name. Error(cannot_create) says which, and where
  /// this training's folder is now. Any thread may call.
  void require_ours() const;
  /// For a folder that was removed: makes it again and locks it, and returns true. False where path() exists.
  bool make_again();
  /// For a folder that was renamed: works in it under its new name from here on, and returns true.
  bool follow();

 private:
  void take_lock();
  void take_back() const;
  bool ours() const;
  std::string renamed_to() const;
  void write_owner();

  std::string path_, owner_;  // owner: what the lock says of this process
  int lock_ = -1;
  bool kept_ = false;
  std::string created_;              // the uppermost folder that was made for it; empty: it was there
  std::vector<std::string> before_;  // what was in it then
  mutable RepeatedWarning status_warning_;
};

}  // namespace sluice
