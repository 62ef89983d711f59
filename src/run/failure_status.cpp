#include "run/failure_status.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "core/host.h"
#include "core/io.h"

namespace sluice {

namespace {

constexpr const char* kName = "status.json";

}  // namespace

FailureStatus::FailureStatus(std::string folder, int rank)
    : folder_(std::move(folder)),
      rank_(rank),
      lock_(open((folder_ + "/lock").c_str(), O_PATH | O_CLOEXEC | O_NOFOLLOW)) {}

FailureStatus::~FailureStatus() {
  if (lock_ >= 0) close(lock_);
}

bool FailureStatus::ours() const {
  struct stat held, there;
  return lock_ >= 0 && fstat(lock_, &held) == 0 && stat((folder_ + "/lock").c_str(), &there) == 0 &&
         held.st_ino == there.st_ino && held.st_dev == there.st_dev;
}

void FailureStatus::write(const std::string& error, ExitCode code, const Reached& reached) const noexcept {
  using Json = nlohmann::ordered_json;
  try {
    const std::string path = folder_ + "/" + kName;
    if (!ours()) return;
    Json status = Json::parse(io::read_file(path), nullptr, false);
    if (!status.is_object() || status.value("state", "") != "running") return;
    status["state"] = "failed";
    if (status.value("step", int64_t{-1}) != reached.step)
      for (const char* of_a_step : {"loss", "seconds_left"}) status.erase(of_a_step);
    status["step"] = reached.step;
    status["tokens"] = reached.tokens;
    status["saved_step"] = reached.saved_step;
    status["heartbeat"] = utc_now();
    status["error"] = error;
    status["exit_code"] = static_cast<int>(code);
    if (code != ExitCode::hang) status["failed_rank"] = rank_;
    const std::string mine = fmt::format("{}.rank{}", path, rank_);  // several ranks may write at once
    io::write_file_atomic(mine, status.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
    io::rename(mine, path);
  } catch (...) {
    return;
  }
}

void FailureStatus::remove_leftovers(const std::string& folder) noexcept {
  try {
    for (const std::string& name : io::list_directory(folder))
      if (name.starts_with(fmt::format("{}.rank", kName))) io::remove_tree(folder + "/" + name);
  } catch (const std::exception& error) {
    spdlog::warn("left by ranks of an earlier start: {}", error.what());
  }
}

}  // namespace sluice
