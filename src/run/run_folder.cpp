#include "run/run_folder.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>

#include "checkpoint/manifest.h"
#include "core/host.h"
#include "core/io.h"
#include "run/algorithms_file.h"
#include "run/failure_status.h"

namespace sluice {

namespace {

/// Files that a run writes at the top level of its folder.
constexpr const char* kFiles[] = {"lock",     "config.yaml",  "config.input.yaml", "cmdline.txt",
                                  "run.json", "status.json",  "metrics.jsonl",     "eval.jsonl",
                                  "bits.log", "console.log",  "heartbeat",         "tb",
                                  "ckpt",     kTokenizerFile, kBpeTokenizerFile,   kAlgorithmsFile};

/// The missing folders of a path, the innermost first.
std::vector<std::string> missing_folders(std::string path) {
  std::vector<std::string> missing;
  while (!path.empty() && !io::exists(path)) {
    missing.push_back(path);
    const size_t slash = path.find_last_not_of('/', path.find_last_of('/'));
    path = path.find('/') == std::string::npos || slash == std::string::npos ? "" : path.substr(0, slash + 1);
  }
  return missing;
}

/// Without it a loss of power may take a new folder's name away, with all that is in it.
void sync_parent(const std::string& folder) {
  const std::string parent = std::filesystem::path(folder).parent_path().string();
  try {
    io::fsync_directory(parent.empty() ? "." : parent);
  } catch (const Error& error) {
    spdlog::warn("{}", error.what());
  }
}

bool same_file(int descriptor, const std::string& path) {
  struct stat held, named;
  return fstat(descriptor, &held) == 0 && lstat(path.c_str(), &named) == 0 && held.st_ino == named.st_ino &&
         held.st_dev == named.st_dev;
}

}  // namespace

RunFolder::RunFolder(std::string path) : path_(std::move(path)), created_(missing_folders(path_)) {
  io::make_directories(path_);
  for (const std::string& folder : created_) sync_parent(folder);
  if (created_.empty()) before_ = io::list_directory(path_);
  try {
    take_lock();
    FailureStatus::remove_leftovers(path_);
  } catch (const Error&) {
    if (lock_ >= 0) close(lock_);
    throw;
  }
}

void RunFolder::take_lock() {
  // An advisory lock on a plain file: its text is for people, the lock itself is held by the kernel.
  const std::string name = file("lock");
  do {
    if (lock_ >= 0) close(lock_);
    // O_NONBLOCK: opening a pipe of that name would block.
    lock_ = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    struct stat info;
    const bool plain = lock_ >= 0 && fstat(lock_, &info) == 0 && S_ISREG(info.st_mode);
    if (lock_ >= 0 && !plain)
      fail(ExitCode::cannot_create, "{} is not a plain file; remove it, or choose another run_dir", name);
    if (lock_ < 0) {
      const int error = errno;
      throw io::IoError(ExitCode::cannot_create,
                        fmt::format("cannot create {}: {}", name, std::strerror(error)), error);
    }
    if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
      char owner[256] = "";
      const auto n = pread(lock_, owner, sizeof owner - 1, 0);
      fail(ExitCode::cannot_create,
           "{} is in use by another run ({}); wait for it, stop it, or choose another run_dir", path_,
           n > 0 ? std::string(owner, static_cast<size_t>(n)) : "owner unknown");
    }
    // A failed start may have removed the file between the two calls.
  } while (!same_file(lock_, name));
  owner_ = fmt::format("pid {} on {} since {}", getpid(), host_name(), utc_now());
  write_owner();
}

void RunFolder::write_owner() {
  if (ftruncate(lock_, 0) != 0 || pwrite(lock_, owner_.data(), owner_.size(), 0) < 0)
    spdlog::warn("cannot write {}: {}", file("lock"), std::strerror(errno));
}

void RunFolder::take_back() const {
  try {
    if (created_.empty()) {
      for (const char* name : kFiles)
        if (std::find(before_.begin(), before_.end(), name) == before_.end()) io::remove_tree(file(name));
      return;
    }
    io::remove_tree(path_);
    // Other runs may have been started in the parents meanwhile: only empty ones go.
    for (size_t i = 1; i < created_.size() && rmdir(created_[i].c_str()) == 0; ++i) {
    }
  } catch (const Error& error) {
    spdlog::warn("left by a failed start: {}", error.what());
  }
}

RunFolder::~RunFolder() {
  if (!kept_) take_back();
  if (lock_ >= 0) close(lock_);
}

std::string RunFolder::path() const {
  const std::lock_guard lock(following_);
  return path_;
}

void RunFolder::write(const std::string& name, const std::string& content) const {
  require_ours();
  io::write_file_atomic(file(name), content);
}

void RunFolder::write_status(nlohmann::ordered_json status) const {
  status["pid"] = getpid();
  status["host"] = host_name();
  status["heartbeat"] = utc_now();
  try {
    write("status.json", status.dump(2) + "\n");
    status_warning_.over();
  } catch (const std::exception& error) {
    status_warning_.warn(fmt::format("status.json: {}", error.what()));
  }
}

/// Some file systems have no stable inode numbers; there the text in the lock decides, which another run
/// replaces.
bool RunFolder::ours() const {
  struct stat held, there;
  if (fstat(lock_, &held) != 0) return true;
  if (stat(file("lock").c_str(), &there) != 0) return false;
  if (held.st_ino == there.st_ino && held.st_dev == there.st_dev) return true;
  try {
    return io::read_file(file("lock"), 4096) == owner_;
  } catch (const Error&) {
    return false;
  }
}

/// The current path of the lock according to the kernel; "" if it was removed.
std::string RunFolder::renamed_to() const {
  char text[4096];
  const ssize_t n = readlink(fmt::format("/proc/self/fd/{}", lock_.load()).c_str(), text, sizeof text - 1);
  const std::string now(text, static_cast<size_t>(std::max<ssize_t>(n, 0)));
  struct stat held, there;
  if (now.empty() || fstat(lock_, &held) != 0 || stat(now.c_str(), &there) != 0 ||
      held.st_ino != there.st_ino)
    return "";
  return now.substr(0, now.rfind('/'));
}

void RunFolder::require_ours() const {
  if (ours()) return;
  const std::string now = renamed_to();
  fail(ExitCode::cannot_create,
       "{} is no longer the folder of this run, which {}{}; nothing more is written there", path(),
       now.empty() ? "was removed" : "was renamed to " + now,
       io::exists(file("lock")) ? ", and another run has taken its place" : "");
}

bool RunFolder::make_again() {
  if (ours() || !renamed_to().empty() || io::exists(file("lock"))) return false;
  io::make_directories(path_);
  const int lock = open(file("lock").c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (lock < 0) return false;
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    close(lock);
    return false;
  }
  close(lock_.exchange(lock));
  write_owner();
  return true;
}

bool RunFolder::follow() {
  if (ours()) return false;
  const std::string now = renamed_to();
  if (now.empty()) return false;
  const std::lock_guard lock(following_);
  path_ = now;
  return true;
}

}  // namespace sluice
