#pragma once
// A mapped file that may be cut short, or become unreadable, while the program runs. Reading a lost page of a
// mapping raises SIGBUS, which ends a program without a word; here it becomes an Error at the next check.
#include <atomic>
#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <utility>

#include "core/io.h"

namespace sluice::io {

/// What a file is, whatever its path: hard links and symbolic links to it are the same one.
struct FileIdentity {
  uint64_t device = 0, inode = 0;
  std::time_t modified = 0;
  bool same_file(const FileIdentity& other) const { return device == other.device && inode == other.inode; }
};

/// Lost pages read as zeros, so every reader copies first and calls check() before it uses the copy. Safe to
/// share between threads.
class GuardedFile {
 public:
  explicit GuardedFile(const std::string& path);

  const unsigned char* data() const { return file_.data(); }
  int64_t size() const { return file_.size(); }
  const std::string& path() const { return file_.path(); }
  const FileIdentity& identity() const { return identity_; }

  /// Error(data) when a page was lost. Zeros without a lost page also appear in the page that the new end of
  /// the file lies in: with `holds_zeros` the file's size is asked for, too.
  void check(bool holds_zeros = false) const {
    if (lost_->load(std::memory_order_relaxed) || (holds_zeros && shorter())) fail_lost();
  }

 private:
  struct Watch;  // keeps the range known to the handler
  struct WatchEnd {
    void operator()(Watch* watch) const;
  };
  bool shorter() const;
  [[noreturn]] void fail_lost() const;

  MappedFile file_;
  FileIdentity identity_;
  std::unique_ptr<Watch, WatchEnd> watch_;  // destroyed before the mapping goes
  const std::atomic<bool>* lost_ = nullptr;
};

}  // namespace sluice::io
