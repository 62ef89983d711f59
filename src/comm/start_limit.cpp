#include "comm/start_limit.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "core/error.h"

namespace sluice {

StartLimit::StartLimit(int rank, double seconds, std::string what_happened) {
  if (seconds <= 0) return;
  thread_ = std::thread([this, rank, seconds, text = std::move(what_happened)] {
    constexpr double kHeadStart = 2;  // seconds that each rank waits longer than the one below it
    const std::chrono::duration<double> limit(seconds + kHeadStart * std::min(rank, 2));
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, limit, [this] { return over_; })) return;
    const std::string line = fmt::format("error: rank {}: {}; all ranks end\n", rank, text);
    [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
    _exit(static_cast<int>(ExitCode::hang));
  });
}

StartLimit::~StartLimit() {
  if (!thread_.joinable()) return;
  {
    const std::scoped_lock lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

}  // namespace sluice
