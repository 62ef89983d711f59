#include "train/run_folder.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#include "core/io.h"

namespace sluice {

std::string host_name() {
  char host[256] = "localhost";
  gethostname(host, sizeof host - 1);
  return host;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

RunFolder::RunFolder(std::string path) : path_(std::move(path)) {
  io::make_directories(path_);
  // Advisory, so a plain file: what it says is for people, what it locks is for the kernel.
  const std::string name = file("lock");
  lock_ = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (lock_ < 0) {
    const int error = errno;
    throw io::IoError(ExitCode::cannot_create,
                      fmt::format("cannot create {}: {}", name, std::strerror(error)), error);
  }
  if (flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    char owner[256] = "";
    const auto n = pread(lock_, owner, sizeof owner - 1, 0);
    close(lock_);
    fail(ExitCode::cannot_create,
         "{} is in use by another training ({}); wait for it, stop it, or choose another run_dir", path_,
         n > 0 ? std::string(owner, static_cast<size_t>(n)) : "owner unknown");
  }
  const std::string owner = fmt::format("pid {} on {} since {}", getpid(), host_name(), utc_now());
  if (ftruncate(lock_, 0) != 0 || pwrite(lock_, owner.data(), owner.size(), 0) < 0)
    spdlog::warn("cannot write {}: {}", name, std::strerror(errno));
}

RunFolder::~RunFolder() {
  if (lock_ >= 0) close(lock_);
}

void RunFolder::write(const std::string& name, const std::string& content) const {
  io::write_file_atomic(file(name), content);
}

void RunFolder::write_status(nlohmann::ordered_json status) const {
  status["pid"] = getpid();
  status["host"] = host_name();
  status["heartbeat"] = utc_now();
  try {
    write("status.json", status.dump(2) + "\n");
  } catch (const io::IoError& error) {
    spdlog::warn("{}", error.what());
  }
}

}  // namespace sluice
