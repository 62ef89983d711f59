#pragma once
// All file access goes through this layer. Errors contain the call, the path and the errno text, and faults
// can be injected at every mutating operation (core/faults.h).
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace sluice::io {

/// A failed system call; what() is one sentence: "cannot write runs/a/x: No space left on device (ENOSPC)".
class IoError : public Error {
 public:
  IoError(ExitCode code, const std::string& message, int error_number)
      : Error(code, message), errno_(error_number) {}
  int error_number() const { return errno_; }

 private:
  int errno_;
};

/// The content of a file. Refuses directories, devices and files above max_bytes. Throws IoError(no_input) if
/// it is absent.
std::string read_file(const std::string& path, int64_t max_bytes = int64_t{1} << 30);
bool exists(const std::string& path);
bool is_directory(const std::string& path);
bool is_link(
    const std::string& path);  // whether the path itself is a symbolic link; the other functions follow links
int64_t file_size(const std::string& path);
/// Names in a folder, sorted, without . and ..
std::vector<std::string> list_directory(const std::string& path);
/// Expands a glob pattern, sorted.
std::vector<std::string> glob(const std::string& pattern);

void make_directories(const std::string& path);  // and parents; existing is fine
void rename(const std::string& from, const std::string& to);
/// Swaps two existing paths atomically. Returns false, without a change, if the file system cannot.
bool exchange(const std::string& a, const std::string& b);
void remove_file(const std::string& path);
void remove_tree(const std::string& path);  // recursively; never follows links
void fsync_directory(const std::string& path);
int64_t free_bytes(const std::string& path);

/// Replaces a small file atomically: temporary file, fsync, rename, fsync of the folder.
void write_file_atomic(const std::string& path, std::string_view content);

/// A file being written. Created with O_CREAT|O_EXCL|O_NOFOLLOW, or opened for appending.
class OutputFile {
 public:
  enum class Mode { create_new, append };
  OutputFile(const std::string& path, Mode mode);
  ~OutputFile();  // closes; does not fsync
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  void write(const void* data, int64_t bytes);  // in pieces of 8 MiB, short writes and EINTR handled
  void write(std::string_view text) { write(text.data(), static_cast<int64_t>(text.size())); }
  void fsync();
  void close();  // reports errors that the destructor would swallow

 private:
  std::string path_;
  int fd_ = -1;
};

/// A file that appears under its name only when it is complete. Until then it is PATH.tmp, which the
/// destructor removes.
class NewFile {
 public:
  explicit NewFile(const std::string& path);  // removes a PATH.tmp that a crash left
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  void write(const void* data, int64_t bytes) { file_.write(data, bytes); }
  void write(std::string_view text) { file_.write(text); }
  /// Syncs and closes: every error of writing is known before a file is published.
  void complete();
  /// Renames to PATH, replacing a file of that name, and syncs the folder.
  void publish();

 private:
  std::string path_, temporary_;
  OutputFile file_;
  bool published_ = false;
};

/// A read-only mapping of a whole regular file.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path, bool follow_links = true);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  const unsigned char* data() const { return data_; }
  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const unsigned char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace sluice::io
