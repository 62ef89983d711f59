#pragma once
// Detects ranks that hang or have died (README.md). A thread of each rank, which does not call MPI, writes a
// heartbeat line to RUN/heartbeat, determines the rank responsible for a hang, and ends all ranks.
#include <atomic>
#include <functional>
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
  std::string phase;      // current phase: "start", "step", "evaluate", "save"
  std::string operation;  // of the communicator; "-" outside of operations
  int64_t sequence = 0;   // operations started
  double idle = 0;        // seconds since the last change of any of these
  double limit = 0;       // limit of idle in this phase
  int64_t beat = 0;    // number of heartbeats so far, which shows that the rank is alive independently of the
                       // hosts' clocks
  int64_t pid = 0;     // 0: not watched, because the rank has ended or has no watchdog
  uint32_t place = 0;  // identifies the machine's boot and the pid namespace
  double unheard = 0;  // not in the line: seconds since the reader saw a new heartbeat, by the reader's clock

  /// Whether the rank has finished training.
  bool over() const { return pid == 0 && limit <= 0; }
  /// kLineBytes characters, ending in a newline.
  std::string line() const;
  /// Parses a line; rank -1 if it is not a heartbeat.
  static Heartbeat parse(const std::string& line);
};

/// Seconds during which this process has watched: monotonic time without intervals in which the process
/// itself did not run (stopped, suspended, starved), because it could not observe others then.
class WatchTime {
 public:
  static constexpr double kMost = 1;  // largest number of seconds counted per look
  /// Reads the clock; to be called a few times a second. Returns the time watched.
  double look(double monotonic) {
    const double passed = monotonic - last_;
    if (looked_ && passed > 0) watched_ += passed < kMost ? passed : kMost;
    looked_ = true;
    last_ = monotonic;
    return watched_;
  }

 private:
  double last_ = 0, watched_ = 0;
  bool looked_ = false;
};

/// The time since each rank was last heard, from its heartbeats and the reader's clock.
class Listener {
 public:
  /// Fills in `unheard` of a heartbeat that was read at `now`. One that is read for the first time may be as
  /// old as the last restart.
  void hear(Heartbeat& line, double now);
  /// Forgets all heartbeats: every rank is alive `now`.
  void restart(double now) {
    heard_.clear();
    since_ = now;
  }

 private:
  struct Heard {
    int64_t beat = -1;
    double at = 0;
  };
  std::vector<Heard> heard_;  // by rank
  double since_ = 0;
};

/// The reason why rank `mine` waits, from the heartbeats of all ranks. Returns "" if some rank is alive and
/// within its limit, so that waiting is justified; otherwise "rank 2 has not been heard of for 8 s (stopped
/// or dead); last at step 40, ..." or the like. A rank that was not heard for `usual_limit` seconds counts as
/// stopped even in a phase with a longer limit, because heartbeats do not depend on the phase.
std::string who_hangs(const std::vector<Heartbeat>& ranks, int mine, double usual_limit);

class Watchdog {
 public:
  /// Starts the thread. path: RUN/heartbeat, on a file system shared by all ranks; rank 0 truncates it first.
  /// After `seconds` without progress, and with a rank found responsible, each rank reports it on stderr and
  /// ends with ExitCode::hang. The same happens as soon as a rank on the same machine has died (launchers
  /// take two seconds to end processes that catch SIGTERM). A stopped rank on the same machine is killed. If
  /// no thread can be started, nothing is watched, and problem() gives the reason. before_end: called with
  /// the report and this rank's step before this rank ends, in a thread of its own, which is given a second.
  Watchdog(
      const Communicator& ranks, std::string path, double seconds,
      std::function<void(const std::string&, int64_t)> before_end = [](const std::string&, int64_t) {});
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  const std::string& problem() const { return problem_; }

  /// Reports progress: the main thread is in `phase` (a literal) of this step. Evaluation and saving may take
  /// 20 times as long as other phases.
  void at(const char* phase, int64_t step);

 private:
  void watch();
  Heartbeat mine() const;
  bool write_heartbeat(Heartbeat me);
  Heartbeat of(int rank) const;
  std::vector<Heartbeat> listen(const Heartbeat& me);
  std::string who_died(const Heartbeat& me);
  [[noreturn]] void end(const std::string& why, const std::vector<Heartbeat>& ranks);

  const Communicator& ranks_;
  std::string path_;
  double seconds_;
  std::function<void(const std::string&, int64_t)> before_end_;
  int file_ = -1;
  std::atomic<const char*> phase_{"start"};
  std::atomic<int64_t> step_{0}, changes_{0};
  WatchTime time_;  // used by the thread, like the members below
  double now_ = 0, changed_ = 0;
  int64_t beat_ = 0;
  bool mute_ = false;  // this rank's heartbeat could not be written
  Listener listener_;
  std::atomic<bool> over_{false};
  std::vector<Heartbeat> neighbours_;  // ranks on this machine whose pids are known and were alive
  std::string problem_;
  std::thread thread_;
};

}  // namespace sluice
