// Loaded before the C library (LD_PRELOAD), writes down every call that changes a folder, in the order in
// which the calls took effect on all ranks, with the bytes that were written. What an explorer of crash
// states (power.py) needs is thereby what the program did, not what it says it does.
//   RECORDER_FOLDER  absolute path of the folder
//   RECORDER_FILE    the records: a line "CALL \t PATH \t OTHER PATH \t OFFSET \t BYTES", then so many bytes
// Compiled by power.py: c++ -shared -fPIC.
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <mutex>
#include <string>

namespace {

template <class F>
F next_of(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}
#define NEXT(name) static const auto next = next_of<decltype(&::name)>(#name)

std::string variable(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}

const std::string& folder() {
  static const std::string path = variable("RECORDER_FOLDER");
  return path;
}

/// Ranks and threads take turns, so that the order of records is that of the calls.
class Turn {
 public:
  Turn() : guard_(mutex()) {
    const int saved = errno;
    static const int shared = next_of<decltype(&::open)>("open")(
        variable("RECORDER_FILE").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    file_ = shared;
    flock(file_, LOCK_EX);
    errno = saved;
  }
  ~Turn() {
    const int saved = errno;
    flock(file_, LOCK_UN);
    errno = saved;
  }
  void note(const char* call, const std::string& path, const std::string& other = "", off_t offset = 0,
            const void* data = nullptr, size_t bytes = 0) const {
    const int saved = errno;
    std::string head = std::string(call) + "\t" + path + "\t" + other + "\t" + std::to_string(offset) + "\t" +
                       std::to_string(bytes) + "\n";
    iovec parts[2] = {{head.data(), head.size()}, {const_cast<void*>(data), bytes}};
    if (writev(file_, parts, 2) != static_cast<ssize_t>(head.size() + bytes)) abort();
    errno = saved;
  }

 private:
  static std::recursive_mutex& mutex() {
    static std::recursive_mutex m;
    return m;
  }
  std::lock_guard<std::recursive_mutex> guard_;
  int file_ = -1;
};

std::string of_descriptor(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, sizeof path);
  return n < 0 ? "" : std::string(path, static_cast<size_t>(n));
}

std::string absolute(int fd, const char* path) {
  if (path[0] == '/') return path;
  if (fd != AT_FDCWD) return of_descriptor(fd) + "/" + path;
  char here[PATH_MAX];
  return getcwd(here, sizeof here) ? std::string(here) + "/" + path : path;
}

bool inside(const std::string& path) {
  return !folder().empty() && path.compare(0, folder().size(), folder()) == 0 &&
         (path.size() == folder().size() || path[folder().size()] == '/');
}

/// An open that may create or empty a file.
template <class Call>
int opened(const std::string& path, int flags, Call&& call) {
  if (!(flags & (O_CREAT | O_TRUNC)) || !inside(path)) return call();
  const Turn turn;
  struct stat info;
  const bool there = lstat(path.c_str(), &info) == 0;
  const int fd = call();
  if (fd >= 0 && !there) turn.note("create", path);
  if (fd >= 0 && there && (flags & O_TRUNC)) turn.note("truncate", path);
  return fd;
}

/// A call that changes names.
template <class Call>
int named(const char* what, const std::string& path, const std::string& other, Call&& call) {
  if (!inside(path) && !inside(other)) return call();
  const Turn turn;
  const int result = call();
  if (result == 0) turn.note(what, path, other);
  return result;
}

template <class Call>
int synced(int fd, Call&& call) {
  const std::string path = of_descriptor(fd);
  if (!inside(path)) return call();
  const Turn turn;
  const int result = call();
  if (result == 0) turn.note("sync", path);
  return result;
}

template <class Call>
ssize_t written(int fd, const void* data, off_t at, Call&& call) {
  const std::string path = folder().empty() || fd < 3 ? "" : of_descriptor(fd);
  if (!inside(path)) return call();
  const Turn turn;
  off_t offset = at;
  if (at < 0) {
    struct stat info {};
    const int flags = fcntl(fd, F_GETFL);
    if (flags & O_APPEND) fstat(fd, &info);
    offset = flags & O_APPEND ? info.st_size : lseek(fd, 0, SEEK_CUR);
  }
  const ssize_t n = call();
  if (n > 0) turn.note("write", path, "", offset, data, static_cast<size_t>(n));
  return n;
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  NEXT(open);
  va_list list;
  va_start(list, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(list, mode_t) : 0;
  va_end(list);
  return opened(absolute(AT_FDCWD, path), flags, [&] { return next(path, flags, mode); });
}
int open64(const char* path, int flags, ...) {
  NEXT(open64);
  va_list list;
  va_start(list, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(list, mode_t) : 0;
  va_end(list);
  return opened(absolute(AT_FDCWD, path), flags, [&] { return next(path, flags, mode); });
}
int openat(int fd, const char* path, int flags, ...) {
  NEXT(openat);
  va_list list;
  va_start(list, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(list, mode_t) : 0;
  va_end(list);
  return opened(absolute(fd, path), flags, [&] { return next(fd, path, flags, mode); });
}
int mkdir(const char* path, mode_t mode) {
  NEXT(mkdir);
  return named("mkdir", absolute(AT_FDCWD, path), "", [&] { return next(path, mode); });
}
int unlink(const char* path) {
  NEXT(unlink);
  return named("remove", absolute(AT_FDCWD, path), "", [&] { return next(path); });
}
int unlinkat(int fd, const char* path, int flags) {
  NEXT(unlinkat);
  return named("remove", absolute(fd, path), "", [&] { return next(fd, path, flags); });
}
int rmdir(const char* path) {
  NEXT(rmdir);
  return named("remove", absolute(AT_FDCWD, path), "", [&] { return next(path); });
}
int rename(const char* from, const char* to) {
  NEXT(rename);
  return named("rename", absolute(AT_FDCWD, from), absolute(AT_FDCWD, to), [&] { return next(from, to); });
}
int renameat2(int a, const char* from, int b, const char* to, unsigned flags) {
  NEXT(renameat2);
  return named(flags & RENAME_EXCHANGE ? "swap" : "rename", absolute(a, from), absolute(b, to),
               [&] { return next(a, from, b, to, flags); });
}
int fsync(int fd) {
  NEXT(fsync);
  return synced(fd, [&] { return next(fd); });
}
int fdatasync(int fd) {
  NEXT(fdatasync);
  return synced(fd, [&] { return next(fd); });
}
int ftruncate(int fd, off_t size) {
  NEXT(ftruncate);
  const std::string path = of_descriptor(fd);
  if (!inside(path)) return next(fd, size);
  const Turn turn;
  const int result = next(fd, size);
  if (result == 0) turn.note("truncate", path, "", size);
  return result;
}
ssize_t write(int fd, const void* data, size_t bytes) {
  NEXT(write);
  return written(fd, data, -1, [&] { return next(fd, data, bytes); });
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
  NEXT(pwrite);
  return written(fd, data, at, [&] { return next(fd, data, bytes, at); });
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t at) {
  NEXT(pwrite64);
  return written(fd, data, at, [&] { return next(fd, data, bytes, at); });
}
/// What the console is told counts from the moment before it is told.
size_t fwrite(const void* data, size_t size, size_t count, FILE* stream) {
  NEXT(fwrite);
  if (stream == stdout && !folder().empty() && memmem(data, size * count, "saved step", 10))
    Turn().note("say", "", "", 0, data, size * count);
  return next(data, size, count, stream);
}
}
