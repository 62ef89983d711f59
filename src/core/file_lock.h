#pragma once
#include <string>

namespace sluice {

/// An advisory lock (flock) on a file, from construction until the process ends, in whatever way, or until
/// destruction. The file stays.
class FileLock {
 public:
  /// Creates the file if it is missing. held_message: of the Error(cannot_create) where another lock on it
  /// exists. Error(cannot_create) also if the file cannot be opened or locked.
  FileLock(const std::string& path, const std::string& held_message);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int file_;
};

}  // namespace sluice
