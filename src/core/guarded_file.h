#pragma once
// A mapped file that may be truncated, or become unreadable, while the program runs. Reading a lost page
// raises SIGBUS, which would kill the program without a message; here it becomes an Error at the next check.
#include <atomic>
#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <utility>

#include "core/io.h"

namespace sluice::io {

/// Identity of a file independent of its path: hard links and symbolic links to it compare equal.
struct FileIdentity {
  uint64_t device = 0, inode = 0;
  std::time_t modified = 0;
  bool same_file(const FileIdentity& other) const { return device == other.device && inode == other.inode; }
};

/// Lost pages read as zeros, so a reader must copy data first and call check() before it uses the copy. Safe
/// to share between threads.
class GuardedFile {
 public:
  explicit GuardedFile(const std::string& path);

  const unsigned char* data() const { return file_.data(); }
  int64_t size() const { return file_.size(); }
  const std::string& path() const { return file_.path(); }
  const FileIdentity& identity() const { return identity_; }

  /// Throws Error(data) if a page was lost. The page that contains the new end of the file reads as zeros
  /// without being lost, so with `holds_zeros` the size of the file is checked too.
  void check(bool holds_zeros = false) const {
    if (lost_->load(std::memory_order_relaxed) || (holds_zeros && shorter())) fail_lost();
  }

 private:
  struct Watch;  // registers the range with the handler
  struct WatchEnd {
    void operator()(Watch* watch) const;
  };
  bool shorter() const;
  [[noreturn]] void fail_lost() const;

  MappedFile file_;
  FileIdentity identity_;
  std::unique_ptr<Watch, WatchEnd> watch_;  // destroyed before the mapping
  const std::atomic<bool>* lost_ = nullptr;
};

}  // namespace sluice::io
