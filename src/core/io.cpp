#include "core/io.h"

#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "core/faults.h"

// Permissions follow the umask (0666 for files, 0777 for folders), as in other programs.

namespace sluice::io {
namespace {

constexpr int64_t kPiece = int64_t{8} << 20;

[[noreturn]] void fail_call(ExitCode code, const std::string& action, const std::string& path, int error) {
  const char* name = strerrorname_np(error);
  throw IoError(
      code,
      fmt::format("cannot {} {}: {} ({})", action, path,
                  strerrordesc_np(error) ? strerrordesc_np(error) : "?", name ? name : std::to_string(error)),
      error);
}

[[noreturn]] void fail_read(const std::string& action, const std::string& path, int error) {
  fail_call(ExitCode::no_input, action, path, error);
}

[[noreturn]] void fail_write(const std::string& action, const std::string& path, int error) {
  fail_call(ExitCode::cannot_create, action, path, error);
}

template <class Call>
auto retry(Call&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

struct Descriptor {
  int fd;
  explicit Descriptor(int fd_) : fd(fd_) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
};

/// Called before every mutating operation except write.
void before(const std::string& action, const std::string& path) {
  int error = 0;
  if (faults::before_operation(action, path, error) == faults::Io::fail) fail_write(action, path, error);
}

void write_fully(int fd, const char* data, int64_t bytes, const std::string& path) {
  while (bytes > 0) {
    const ssize_t n = retry([&] { return ::write(fd, data, static_cast<size_t>(bytes)); });
    if (n < 0) fail_write("write", path, errno);
    if (n == 0) fail_write("write", path, ENOSPC);
    data += n;
    bytes -= n;
  }
}

/// Cleanup after an error: a second failure must not hide the first.
void remove_quietly(const std::string& path) {
  try {
    remove_file(path);
  } catch (const Error&) {
  }
}

std::string parent_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

/// O_NONBLOCK: opening a FIFO without a writer must fail below, not hang.
int open_regular(const std::string& path, int flags, struct stat& info) {
  const int fd = retry([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags); });
  if (fd < 0) {
    if (errno == ELOOP && (flags & O_NOFOLLOW))
      fail(ExitCode::data, "cannot read {}: it is a symbolic link", path);
    fail_read("open", path, errno);
  }
  if (::fstat(fd, &info) != 0) {
    const int error = errno;
    ::close(fd);
    fail_read("inspect", path, error);
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(fd);
    fail(ExitCode::data, "cannot read {}: it is {}, not a file", path,
         S_ISDIR(info.st_mode) ? "a folder" : "a device, pipe or socket");
  }
  return fd;
}

std::vector<std::string> names_in(int fd, const std::string& path) {
  DIR* dir = ::fdopendir(fd);  // takes the descriptor over
  if (!dir) {
    const int error = errno;
    ::close(fd);
    fail_read("list", path, error);
  }
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(dir)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
    errno = 0;
  }
  const int error = errno;
  ::closedir(dir);
  if (error) fail_read("list", path, error);
  std::sort(names.begin(), names.end());
  return names;
}

void remove_tree_at(int parent, const std::string& name, const std::string& path) {
  struct stat info;
  if (::fstatat(parent, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return;
    fail_write("remove", path, errno);
  }
  const bool folder = S_ISDIR(info.st_mode);
  if (folder) {
    const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    const Descriptor dir(retry([&] { return ::openat(parent, name.c_str(), flags); }));
    if (dir.fd < 0) fail_write("open folder", path, errno);
    const int listing = ::dup(dir.fd);
    if (listing < 0) fail_write("open folder", path, errno);
    for (const std::string& child : names_in(listing, path))
      remove_tree_at(dir.fd, child, path + "/" + child);
  }
  const char* action = folder ? "remove folder" : "remove";
  before(action, path);
  if (::unlinkat(parent, name.c_str(), folder ? AT_REMOVEDIR : 0) != 0) fail_write(action, path, errno);
}

}  // namespace

// ---- reading ---------------------------------------------------------------------------------------------

std::string read_file(const std::string& path, int64_t max_bytes) {
  struct stat info;
  const Descriptor file(open_regular(path, 0, info));
  if (info.st_size > max_bytes)
    fail(ExitCode::data, "cannot read {}: {} bytes, at most {} are accepted", path, info.st_size, max_bytes);
  std::string content(static_cast<size_t>(info.st_size), '\0');
  size_t used = 0;
  for (;;) {
    // One byte more than the size, so that growing files, and files in /proc with size 0, are read to their
    // end.
    if (used == content.size())
      content.resize(used + (used == static_cast<size_t>(info.st_size) ? 1 : 65536));
    const size_t want = std::min(content.size() - used, static_cast<size_t>(kPiece));
    const ssize_t n = retry([&] { return ::read(file.fd, content.data() + used, want); });
    if (n < 0) fail_call(ExitCode::data, "read", path, errno);
    if (n == 0) break;
    used += static_cast<size_t>(n);
    if (static_cast<int64_t>(used) > max_bytes)
      fail(ExitCode::data, "cannot read {}: more than {} bytes", path, max_bytes);
  }
  content.resize(used);
  return content;
}

bool exists(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0;
}

bool is_directory(const std::string& path) {
  struct stat info;
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

bool is_link(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0 && S_ISLNK(info.st_mode);
}

int64_t file_size(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) fail_read("inspect", path, errno);
  return info.st_size;
}

std::vector<std::string> list_directory(const std::string& path) {
  const int fd = retry([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  if (fd < 0) fail_read("list", path, errno);
  return names_in(fd, path);
}

std::vector<std::string> glob(const std::string& pattern) {
  glob_t found{};
  const int status = ::glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> paths;
  for (size_t i = 0; status == 0 && i < found.gl_pathc; ++i) paths.emplace_back(found.gl_pathv[i]);
  ::globfree(&found);
  if (status != 0 && status != GLOB_NOMATCH)
    fail_read("expand", pattern, status == GLOB_NOSPACE ? ENOMEM : EIO);
  std::sort(paths.begin(), paths.end());  // by bytes: glob's own order depends on the locale
  return paths;
}

int64_t free_bytes(const std::string& path) {
  struct statvfs info;
  if (retry([&] { return ::statvfs(path.c_str(), &info); }) != 0)
    fail_read("inspect the file system of", path, errno);
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

// ---- changing --------------------------------------------------------------------------------------------

void make_directories(const std::string& path) {
  if (path.empty() || is_directory(path)) return;
  const std::string parent = parent_of(path);
  if (parent != path) make_directories(parent);
  before("create folder", path);
  if (::mkdir(path.c_str(), 0777) != 0 && !(errno == EEXIST && is_directory(path)))
    fail_write("create folder", path, errno);
}

void rename(const std::string& from, const std::string& to) {
  before("rename " + from + " to", to);
  if (::rename(from.c_str(), to.c_str()) != 0) fail_write("rename " + from + " to", to, errno);
}

bool exchange(const std::string& a, const std::string& b) {
  before("swap " + a + " and", b);
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) fail_write("swap " + a + " and", b, errno);
  return false;
}

void remove_file(const std::string& path) {
  before("remove", path);
  if (::unlink(path.c_str()) != 0) fail_write("remove", path, errno);
}

void remove_tree(const std::string& path) { remove_tree_at(AT_FDCWD, path, path); }

void fsync_directory(const std::string& path) {
  before("sync folder", path);
  const Descriptor dir(retry([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (dir.fd < 0) fail_write("sync folder", path, errno);
  // Some network file systems do not support fsync of folders and return EINVAL; they order metadata
  // themselves.
  if (retry([&] { return ::fsync(dir.fd); }) != 0 && errno != EINVAL) fail_write("sync folder", path, errno);
}

void write_file_atomic(const std::string& path, std::string_view content) {
  NewFile file(path);
  file.write(content);
  file.complete();
  file.publish();
}

OutputFile::OutputFile(const std::string& path, Mode mode) : path_(path) {
  const bool append = mode == Mode::append;
  const char* action = append ? "append to" : "create";
  // O_NONBLOCK: opening a pipe without a reader must fail, not hang.
  const int flags = O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | (append ? O_APPEND : O_EXCL);
  before(action, path_);
  fd_ = retry([&] { return ::open(path_.c_str(), flags, 0666); });
  if (fd_ < 0) fail_write(action, path_, errno);
  struct stat info;
  if (::fstat(fd_, &info) == 0 && S_ISREG(info.st_mode)) return;
  ::close(std::exchange(fd_, -1));
  fail(ExitCode::cannot_create, "cannot {} {}: it is not a plain file", action, path_);
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
}

void OutputFile::write(const void* data, int64_t bytes) {
  SLUICE_CHECK(fd_ >= 0, "{} is written after close", path_);
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const int64_t piece = std::min(bytes, kPiece);  // write() itself stops at 0x7ffff000 bytes
    int error = 0;
    const faults::Io fault = faults::before_operation("write", path_, error);
    // A disk that is really full also writes part of the data before it fails.
    write_fully(fd_, from, fault == faults::Io::none ? piece : piece / 2, path_);
    if (fault == faults::Io::torn) ::kill(::getpid(), SIGKILL);
    if (fault == faults::Io::fail) fail_write("write", path_, error);
    from += piece;
    bytes -= piece;
  }
}

void OutputFile::fsync() {
  SLUICE_CHECK(fd_ >= 0, "{} is synced after close", path_);
  before("sync", path_);
  if (retry([&] { return ::fsync(fd_); }) != 0) fail_write("sync", path_, errno);
}

void OutputFile::close() {
  if (fd_ < 0) return;
  // Not retried: Linux has released the descriptor even when close() reports EINTR.
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail_write("close", path_, errno);
}

namespace {

/// The name that a file has until it is complete, free.
std::string temporary_of(const std::string& path) {
  std::string temporary = path + ".tmp";
  struct stat info;
  if (::lstat(temporary.c_str(), &info) == 0) remove_file(temporary);
  return temporary;
}

}  // namespace

NewFile::NewFile(const std::string& path)
    : path_(path), temporary_(temporary_of(path)), file_(temporary_, OutputFile::Mode::create_new) {}

NewFile::~NewFile() {
  if (!published_) remove_quietly(temporary_);
}

void NewFile::complete() {
  file_.fsync();
  file_.close();
}

void NewFile::publish() {
  rename(temporary_, path_);
  published_ = true;
  fsync_directory(parent_of(path_));
}

// ---- mapping ---------------------------------------------------------------------------------------------

MappedFile::MappedFile(const std::string& path, bool follow_links) : path_(path) {
  struct stat info;
  const Descriptor file(open_regular(path, follow_links ? 0 : O_NOFOLLOW, info));
  size_ = info.st_size;
  if (size_ == 0) return;
  void* p = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (p == MAP_FAILED) fail_read("map", path, errno);
  data_ = static_cast<const unsigned char*>(p);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<unsigned char*>(data_), static_cast<size_t>(size_));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace sluice::io
