#pragma once
// A limit on the time that ranks wait for each other before a watchdog watches over them.
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace sluice {

/// While it lives, a thread waits; after `seconds` (0: never) it prints "error: rank R: <what happened>; all
/// ranks end" and ends the process with ExitCode::hang. The lowest rank that waits prints, so that the
/// launcher ends the others before they do.
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
