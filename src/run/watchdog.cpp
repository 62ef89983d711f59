#include "run/watchdog.h"

#include <fcntl.h>
#include <signal.h>
#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>
#include <vector>

#include "core/start_thread.h"

namespace sluice {
namespace {

constexpr double kStale =
    3;  // seconds without a new heartbeat, written once a second, after which a rank counts as dead
constexpr double kLongPhases = 20;  // factor on the limit during evaluation and saving
constexpr double kPoll = 0.25;
constexpr double kUnwatched = 1e9;  // limit of a rank without a watchdog
constexpr double kQuiet =
    1;  // seconds between heartbeats; shorter while a rank waits, because others decide by them

double steady_time() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

uint32_t this_place() {
  std::string text;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), text);
  char space[64] = "";
  if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) return 0;
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const char c : text + space) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

std::string where(const Heartbeat& h) {
  return fmt::format("step {}, phase {}, {}", h.step, h.phase,
                     h.operation == "-" ? std::string("in no operation")
                                        : fmt::format("operation {} (number {})", h.operation, h.sequence));
}

/// If ranks wait in different operations: the one that differs from all others, or all of them if there are
/// two.
std::string odd_operation(const std::vector<Heartbeat>& ranks) {
  std::map<std::string, std::vector<const Heartbeat*>> at;
  for (const Heartbeat& h : ranks)
    if (h.rank >= 0 && !h.over()) at[h.operation].push_back(&h);
  if (at.size() < 2) return "";
  std::vector<const Heartbeat*> alone;
  std::string all;
  for (const auto& [operation, those] : at) {
    if (those.size() == 1) alone.push_back(those[0]);
    for (const Heartbeat* h : those)
      all += fmt::format("{}rank {} in {}", all.empty() ? "" : ", ", h->rank, operation);
  }
  if (alone.size() == 1)
    return fmt::format("rank {} calls another operation than the others: {}, for {:.0f} s ({})",
                       alone[0]->rank, where(*alone[0]), alone[0]->idle, all);
  return fmt::format("the ranks call different operations: {}; step {}, number {}, for {:.0f} s", all,
                     ranks[0].step, ranks[0].sequence, ranks[0].idle);
}

/// A rank whose last heartbeat is older than `seconds`; "" if there is none.
std::string who_is_silent(const std::vector<Heartbeat>& ranks, double seconds) {
  for (const Heartbeat& h : ranks)
    if (h.rank >= 0 && h.pid > 0 && h.unheard > seconds)
      return fmt::format("rank {} has not been heard of for {:.0f} s (stopped or dead); last at {}", h.rank,
                         h.unheard, where(h));
  return "";
}

}  // namespace

std::string Heartbeat::line() const {
  std::string text = fmt::format(
      "rank {} step {} phase {} operation {} sequence {} idle {:.1f} limit {:.1f} beat {} pid {} place {}",
      rank, step, phase, operation, sequence, idle, limit, beat, pid, place);
  text.resize(static_cast<size_t>(kLineBytes) - 1, ' ');
  return text + "\n";
}

Heartbeat Heartbeat::parse(const std::string& line) {
  std::istringstream in(line);
  std::string word;
  Heartbeat h;
  in >> word >> h.rank >> word >> h.step >> word >> h.phase >> word >> h.operation >> word >> h.sequence >>
      word >> h.idle >> word >> h.limit >> word >> h.beat >> word >> h.pid >> word >> h.place;
  if (!in || word != "place") h.rank = -1;
  return h;
}

void Listener::hear(Heartbeat& line, double now) {
  if (line.rank < 0) return;
  if (std::ssize(heard_) <= line.rank) heard_.resize(static_cast<size_t>(line.rank) + 1);
  Heard& heard = heard_[static_cast<size_t>(line.rank)];
  if (heard.beat != line.beat) heard = {line.beat, heard.beat == -1 ? since_ : now};
  line.unheard = now - heard.at;
}

std::string who_hangs(const std::vector<Heartbeat>& ranks, int mine, double usual_limit) {
  for (const Heartbeat& h : ranks)
    if (h.rank == mine && h.idle <= h.limit) return who_is_silent(ranks, std::max(kStale, usual_limit));
  if (const std::string silent = who_is_silent(ranks, kStale); !silent.empty()) return silent;
  int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
  for (const Heartbeat& h : ranks) {
    if (h.rank < 0 || h.over()) continue;
    // One rank is still within its limit, so the others may wait for it.
    if (h.idle <= h.limit) return "";
    first = std::min(first, h.sequence);
    last = std::max(last, h.sequence);
  }
  for (const Heartbeat& h : ranks)
    if (h.rank >= 0 && !h.over() && h.operation == "-")
      return fmt::format("rank {} computes without end: {}, for {:.0f} s", h.rank, where(h), h.idle);
  for (const Heartbeat& h : ranks)
    if (h.rank >= 0 && !h.over() && h.sequence == first && first < last)
      return fmt::format("rank {} is behind, in another operation than the others: {}, for {:.0f} s", h.rank,
                         where(h), h.idle);
  if (const std::string odd = odd_operation(ranks); !odd.empty()) return odd;
  for (const Heartbeat& h : ranks)
    if (h.rank == mine)
      return fmt::format("all ranks wait for each other: {}, for {:.0f} s (mismatched calls, or the network)",
                         where(h), h.idle);
  return "";
}

Watchdog::Watchdog(const Communicator& ranks, std::string path, double seconds,
                   std::function<void(const std::string&, int64_t)> before_end)
    : ranks_(ranks), path_(std::move(path)), seconds_(seconds), before_end_(std::move(before_end)) {
  file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | (ranks.rank() == 0 ? O_TRUNC : 0),
               0600);
  write_heartbeat(mine());  // so that a rank that stops immediately also has a heartbeat
  if (start_thread(
          thread_, [this] { watch(); }, problem_))
    return;
  problem_ = fmt::format("the watchdog {}; a hang of this rank will not be detected", problem_);
  Heartbeat unwatched = mine();
  unwatched.pid = 0;
  unwatched.limit = kUnwatched;  // the others cannot know its limit
  write_heartbeat(unwatched);
}

/// Writes this rank's heartbeat.
bool Watchdog::write_heartbeat(Heartbeat me) {
  me.beat = ++beat_;
  const std::string line = me.line();
  const bool written =
      file_ >= 0 && pwrite(file_, line.data(), line.size(), me.rank * Heartbeat::kLineBytes) > 0;
  // If this rank cannot write to the file, heartbeats of others may be missing, too.
  if (!written || mute_) listener_.restart(now_);
  mute_ = !written;
  return written;
}

Watchdog::~Watchdog() {
  over_ = true;
  if (thread_.joinable()) {
    thread_.join();
    Heartbeat last = mine();
    last.pid = 0;
    last.limit = 0;
    write_heartbeat(last);
  }
  if (file_ >= 0) close(file_);
}

void Watchdog::at(const char* phase, int64_t step) {
  phase_ = phase;
  step_ = step;
  ++changes_;
}

Heartbeat Watchdog::mine() const {
  Heartbeat h;
  h.rank = ranks_.rank();
  h.step = step_;
  h.phase = phase_;
  const char* operation = ranks_.progress().operation;
  h.operation = operation ? operation : "-";
  h.sequence = ranks_.progress().sequence;
  h.idle = now_ - changed_;
  h.limit = h.phase == "evaluate" || h.phase == "save" ? kLongPhases * seconds_ : seconds_;
  h.pid = getpid();
  static const uint32_t place = this_place();
  h.place = place;
  return h;
}

/// The heartbeat of a rank; rank -1 if there is none.
Heartbeat Watchdog::of(int rank) const {
  std::string line(static_cast<size_t>(Heartbeat::kLineBytes), ' ');
  if (file_ < 0 ||
      pread(file_, line.data(), line.size(), rank * Heartbeat::kLineBytes) != Heartbeat::kLineBytes)
    line.clear();
  return Heartbeat::parse(line);
}

/// The heartbeats of all ranks, with the time since each was last heard.
std::vector<Heartbeat> Watchdog::listen(const Heartbeat& me) {
  const auto length = static_cast<size_t>(Heartbeat::kLineBytes);
  std::string lines(length * static_cast<size_t>(ranks_.size()), ' ');
  if (file_ < 0 || pread(file_, lines.data(), lines.size(), 0) < 0) lines.assign(lines.size(), ' ');
  std::vector<Heartbeat> all;
  for (size_t r = 0; r < static_cast<size_t>(ranks_.size()); ++r) {
    all.push_back(static_cast<int>(r) == me.rank ? me : Heartbeat::parse(lines.substr(r * length, length)));
    if (all.back().rank != static_cast<int>(r)) all.back().rank = -1;
    if (static_cast<int>(r) != me.rank) listener_.hear(all.back(), now_);
  }
  return all;
}

/// Finds other ranks on this machine as they appear, and checks that the known ones are alive.
std::string Watchdog::who_died(const Heartbeat& me) {
  while (std::ssize(neighbours_) < ranks_.size()) {
    const int next = static_cast<int>(std::ssize(neighbours_));
    const Heartbeat h = next == me.rank ? me : of(next);
    if (h.rank != next) break;  // not there yet
    neighbours_.push_back(h);
  }
  for (const Heartbeat& h : neighbours_) {
    if (h.rank == me.rank || h.place != me.place || me.place == 0 || h.pid == 0) continue;
    if (kill(static_cast<pid_t>(h.pid), 0) == 0 || errno != ESRCH || of(h.rank).pid != h.pid) continue;
    return fmt::format("rank {} (pid {}) is gone; last at {}", h.rank, h.pid, where(of(h.rank)));
  }
  return "";
}

void Watchdog::watch() {
  int64_t seen = -1;
  double written = -kQuiet, listened = -kQuiet;
  while (!over_) {
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(kPoll, seconds_ / 4)));
    now_ = time_.look(steady_time());
    const int64_t now_seen =
        changes_ + ranks_.progress().sequence * 2 + (ranks_.progress().operation.load() != nullptr);
    if (now_seen != seen) {
      seen = now_seen;
      changed_ = now_;
      listener_.restart(now_);  // heartbeats are not read while there is progress
    }
    const Heartbeat me = mine();
    if ((now_ - written >= kQuiet || me.idle > kQuiet) && write_heartbeat(me)) written = now_;
    if (const std::string why = who_died(me); !why.empty()) end(why, {});
    if (me.idle <= kQuiet || (me.idle <= seconds_ && now_ - listened < kQuiet)) continue;
    listened = now_;
    const std::vector<Heartbeat> all = listen(me);
    if (me.idle <= seconds_) continue;
    if (const std::string why = who_hangs(all, me.rank, seconds_); !why.empty())
      end(fmt::format("no progress for {:.0f} s: {}", me.idle, why), all);
  }
}

void Watchdog::end(const std::string& why, const std::vector<Heartbeat>& ranks) {
  // From here on nothing may block: no locks of the process and no MPI.
  const std::string text = fmt::format("error: rank {}: {}; all ranks end\n", ranks_.rank(), why);
  const Heartbeat me = mine();
  bool reported = write(STDERR_FILENO, text.data(), text.size()) > 0;
  // A folder that does not answer must not keep this process.
  std::atomic<bool> told{false};
  std::thread last;
  if (std::string problem; start_thread(
          last,
          [&] {
            before_end_(why, me.step);
            told = true;
          },
          problem))
    last.detach();
  else
    told = true;
  for (int i = 0; i < 100 && !told; ++i) usleep(10'000);
  // A stopped rank cannot end itself. A child process kills it a moment later, so that the launcher sees this
  // process's exit code first.
  for (const Heartbeat& h : ranks)
    if (reported && h.rank >= 0 && h.place == me.place && h.pid > 0 && h.unheard > kStale && fork() == 0) {
      usleep(200'000);
      kill(static_cast<pid_t>(h.pid), SIGKILL);
      _exit(0);
    }
  _exit(static_cast<int>(ExitCode::hang));
}

}  // namespace sluice
