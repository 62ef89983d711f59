#pragma once
// Notices ranks that hang without dying, and ranks that died (RELIABILITY 8): a thread of each rank that calls no MPI, a line per
// rank in RUN/heartbeat, and one decision: who is to blame, and all ranks gone.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"

namespace sluice {

/// One rank's line in RUN/heartbeat: kLineBytes of text, written about once a second.
struct Heartbeat {
  static constexpr int64_t kLineBytes = 224;
  int rank = 0;
  int64_t step = 0;
  std::string phase;      // what the rank is at: "start", "step", "evaluate", "save"
  std::string operation;  // of the communicator; "-" when it is in none
  int64_t sequence = 0;   // operations begun
  double idle = 0;        // seconds since any of these changed
  double limit = 0;       // how long that may last in this phase
  double written = 0;     // Unix time
  int64_t pid = 0;        // 0: over, it needs nobody's attention any more
  uint32_t place = 0;     // where pids mean the same: of the machine's boot and the namespace

  /// kLineBytes long, its last a newline.
  std::string line() const;
  /// Of a line that holds one; rank -1 otherwise.
  static Heartbeat parse(const std::string& line);
};

/// What keeps `mine` waiting, from all ranks' lines at `now`: "" where somebody is still within its limit and alive, so that
/// waiting is right. Otherwise "rank 2 has not been heard of for 8 s (stopped or dead), last at step 40 in ..." and the like. In a
/// phase that may take longer than `usual_limit` seconds, a rank that was not heard of for as long is stopped all the same: lines
/// come whatever a rank does.
std::string who_hangs(const std::vector<Heartbeat>& ranks, int mine, double now, double usual_limit);

class Watchdog {
 public:
  /// Starts the thread. path: RUN/heartbeat, on a file system that all ranks share; rank 0 empties it first. After `seconds`
  /// without progress, and with somebody to blame, rank by rank says so on stderr and ends with ExitCode::hang; so it does as
  /// soon as a rank of the same machine is no more (launchers take two seconds to end who catches SIGTERM). A rank of the same
  /// machine that is stopped is killed.
  Watchdog(const Communicator& ranks, std::string path, double seconds);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Progress: the main thread is at `phase` (a literal) of this step. Evaluation and saving may take 20 times as long.
  void at(const char* phase, int64_t step);

 private:
  void watch();
  Heartbeat mine() const;
  bool tell(const Heartbeat& me) const;
  Heartbeat of(int rank) const;
  std::string who_died(const Heartbeat& me);
  [[noreturn]] void end(const std::string& why, const std::vector<Heartbeat>& ranks);

  const Communicator& ranks_;
  std::string path_;
  double seconds_;
  int file_ = -1;
  std::atomic<const char*> phase_{"start"};
  std::atomic<int64_t> step_{0}, changes_{0};
  std::atomic<double> changed_;
  std::atomic<bool> over_{false};
  std::vector<Heartbeat> neighbours_;  // ranks of this machine whose pids are known and were alive
  std::thread thread_;
};

}  // namespace sluice
