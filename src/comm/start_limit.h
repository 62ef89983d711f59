#pragma once
// A limit on the time that ranks wait for each other before the watchdog runs.
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace sluice {

/// Unless it is destroyed within `seconds` (0: no limit), a thread prints "error: rank R: <what happened>;
/// all ranks end" and ends the process with ExitCode::hang. The lowest waiting rank prints first, so that the
/// launcher ends the others before they print too.
class StartLimit {
 public:
  StartLimit(int rank, double seconds, std::string what_happened);
  ~StartLimit();
  StartLimit(const StartLimit&) = delete;
  StartLimit& operator=(const StartLimit&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace sluice
