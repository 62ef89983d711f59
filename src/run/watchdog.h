#pragma once
// Notices ranks that hang without dying, and ranks that died (README.md): a thread of each rank that
// calls no MPI, a line per rank in RUN/heartbeat, and one decision: who is to blame, and all ranks gone.
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
  int64_t beat = 0;  // lines written so far: what shows that the rank lives, whatever the clocks of hosts say
  int64_t pid = 0;   // 0: not watched (any more): the rank has ended, or has no watchdog
  uint32_t place = 0;  // where pids mean the same: of the machine's boot and the namespace
  double unheard =
      0;  // not in the line: seconds since the reader last saw a new one, by the reader's own clock

  /// The rank's training has ended: nothing is expected of it.
  bool over() const { return pid == 0 && limit <= 0; }
  /// kLineBytes long, its last a newline.
  std::string line() const;
  /// Of a line that holds one; rank -1 otherwise.
  static Heartbeat parse(const std::string& line);
};

/// Seconds that this process has watched: those of its monotonic clock, but for times in which it did not run
/// itself (stopped, suspended, starved). What others did then it cannot know, and a clock that is set says
/// nothing.
class WatchTime {
 public:
  static constexpr double kMost = 1;  // seconds that one look accounts for
  /// A look at the clock, a few times a second. Returns the time watched.
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

/// How long each rank has not been heard of, from its beats and the reader's own time.
class Listener {
 public:
  /// Fills in `unheard` of a line that was read at `now`.
  void hear(Heartbeat& line, double now);
  /// Forgets what was heard, as if listening began now.
  void start_anew() { heard_.clear(); }

 private:
  struct Heard {
    int64_t beat = -1;
    double at = 0;
  };
  std::vector<Heard> heard_;  // by rank
};

/// What keeps `mine` waiting, from all ranks' lines: "" where somebody is still within its limit and alive,
/// so that waiting is right. Otherwise "rank 2 has not been heard of for 8 s (stopped or dead), last at step
/// 40 in ..." and the like. In a phase that may take longer than `usual_limit` seconds, a rank that was not
/// heard of for as long is stopped all the same: lines come whatever a rank does.
std::string who_hangs(const std::vector<Heartbeat>& ranks, int mine, double usual_limit);

class Watchdog {
 public:
  /// Starts the thread. path: RUN/heartbeat, on a file system that all ranks share; rank 0 empties it first.
  /// After `seconds` without progress, and with somebody to blame, rank by rank says so on stderr and ends
  /// with ExitCode::hang; so it does as soon as a rank of the same machine is no more (launchers take two
  /// seconds to end who catches SIGTERM). A rank of the same machine that is stopped is killed. Where no
  /// thread can be made nothing is watched, and problem() says so.
  Watchdog(const Communicator& ranks, std::string path, double seconds);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  const std::string& problem() const { return problem_; }

  /// Progress: the main thread is at `phase` (a literal) of this step. Evaluation and saving may take 20
  /// times as long.
  void at(const char* phase, int64_t step);

 private:
  void watch();
  Heartbeat mine() const;
  bool tell(Heartbeat me);
  Heartbeat of(int rank) const;
  std::vector<Heartbeat> listen(const Heartbeat& me);
  std::string who_died(const Heartbeat& me);
  [[noreturn]] void end(const std::string& why, const std::vector<Heartbeat>& ranks);

  const Communicator& ranks_;
  std::string path_;
  double seconds_;
  int file_ = -1;
  std::atomic<const char*> phase_{"start"};
  std::atomic<int64_t> step_{0}, changes_{0};
  WatchTime time_;  // the thread's, as what follows
  double now_ = 0, changed_ = 0;
  int64_t beat_ = 0;
  bool mute_ = false;  // this rank's own line could not be written
  Listener listener_;
  std::atomic<bool> over_{false};
  std::vector<Heartbeat> neighbours_;  // ranks of this machine whose pids are known and were alive
  std::string problem_;
  std::thread thread_;
};

}  // namespace sluice
