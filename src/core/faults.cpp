#include "core/faults.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"

namespace sluice::faults {
namespace {

constexpr std::chrono::minutes kLongestPause{2};

std::string text_of(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words(1);
  for (const char c : text) {
    if (c == ':')
      words.emplace_back();
    else
      words.back() += c;
  }
  return words;
}

bool is_number(const std::string& word) {
  return !word.empty() && word.find_first_not_of("0123456789") == std::string::npos;
}

int64_t number(const std::string& word) {
  int64_t value = -1;
  std::from_chars(word.data(), word.data() + word.size(), value);
  return value;
}

[[noreturn]] void refuse(const char* variable, const std::string& text, const char* form) {
  fail(ExitCode::usage, "{}={}: must be {}", variable, text, form);
}

int errno_of(std::string_view name) {
  constexpr std::pair<std::string_view, int> known[] = {{"ENOSPC", ENOSPC}, {"EIO", EIO},
                                                        {"EACCES", EACCES}, {"EROFS", EROFS},
                                                        {"EMFILE", EMFILE}, {"EDQUOT", EDQUOT}};
  for (const auto& [text, value] : known)
    if (text == name) return value;
  return 0;
}

/// The operation at which a fault is injected.
struct Plan {
  std::string text;  // of the environment variable
  int64_t at = 0;    // 0: never, or on another rank
  bool torn = false, sticky = false;
  int error = 0;
};

enum class PlanKind { crash, io_failure, thread_failure };

Plan parse_plan(const char* variable, const std::string& text, PlanKind kind) {
  Plan plan;
  plan.text = text;
  if (text.empty()) return plan;
  std::vector<std::string> words = split(text);
  bool mine = true;
  if (words.size() > 1 && is_number(words[1])) {
    mine = is_number(words[0]) && number(words[0]) == process_rank();
    words.erase(words.begin());
  }
  plan.at = is_number(words[0]) ? number(words[0]) : -1;
  words.erase(words.begin());
  bool ok = plan.at >= 1;
  const char* form = "";
  switch (kind) {
    case PlanKind::io_failure:
      form = "[RANK:]n:ERRNO[:sticky]";
      plan.error = words.empty() ? 0 : errno_of(words[0]);
      plan.sticky = words.size() == 2 && words[1] == "sticky";
      ok = ok && plan.error && (words.size() == 1 || plan.sticky);
      break;
    case PlanKind::crash:
      form = "[RANK:]n[:torn]";
      plan.torn = words.size() == 1 && words[0] == "torn";
      ok = ok && (words.empty() || plan.torn);
      break;
    case PlanKind::thread_failure:
      form = "[RANK:]n[:sticky]";
      plan.sticky = words.size() == 1 && words[0] == "sticky";
      ok = ok && (words.empty() || plan.sticky);
      break;
  }
  if (!ok) refuse(variable, text, form);
  if (!mine) plan.at = 0;
  return plan;
}

/// Whether the count-th operation is one that fails.
bool meant(const Plan& plan, int64_t count) {
  return plan.at && (plan.sticky ? count >= plan.at : count == plan.at);
}

/// SLUICE_PAUSE if it applies to this rank; otherwise the phase is empty.
struct Pause {
  std::string phase, file;
  int64_t step = 0;
};

const Pause& pause_plan() {
  static const Pause plan = [] {
    Pause p;
    const std::string text = text_of("SLUICE_PAUSE");
    if (text.empty()) return p;
    std::vector<std::string> words = split(text);
    bool mine = true;
    if (is_number(words[0])) {
      mine = number(words[0]) == process_rank();
      words.erase(words.begin());
    }
    constexpr std::string_view phases[] = {"init", "data", "step", "all_reduce", "save", "evaluate", "io"};
    if (words.size() != 3 || std::find(std::begin(phases), std::end(phases), words[0]) == std::end(phases) ||
        !is_number(words[1]))
      refuse("SLUICE_PAUSE", text,
             "[RANK:]PHASE:step:FILE, PHASE one of init, data, step, all_reduce, save, evaluate, io");
    if (mine) p = {words[0], words[2], number(words[1])};
    return p;
  }();
  return plan;
}

void pause(const Pause& plan) {
  static std::atomic<bool> paused{false};
  if (paused.exchange(true)) return;  // once
  const std::string file = plan.file + "." + std::to_string(process_rank());
  const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) return;
  ::close(fd);
  const auto end = std::chrono::steady_clock::now() + kLongestPause;
  while (::access(file.c_str(), F_OK) == 0 && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

/// A switch RANK:step[:code] that applies to this rank.
struct Point {
  int64_t step = -1, code = 0;
};

Point parse_point(const char* variable, bool wants_code) {
  const std::string text = text_of(variable);
  if (text.empty()) return {};
  const std::vector<std::string> words = split(text);
  const size_t count = wants_code ? 3 : 2;
  if (words.size() != count || !std::all_of(words.begin(), words.end(), is_number))
    refuse(variable, text, wants_code ? "RANK:step:code" : "RANK:step");
  if (number(words[0]) != process_rank()) return {};
  return {number(words[1]), wants_code ? number(words[2]) : 0};
}

/// Counts the operations of the process.
class Operations {
 public:
  Io next(const std::string& action, const std::string& path, int& error) {
    const std::lock_guard lock(mutex_);
    refresh("SLUICE_CRASH", crash_, PlanKind::crash);
    refresh("SLUICE_IOFAIL", fail_, PlanKind::io_failure);
    ++count_;
    if (const char* trace = std::getenv("SLUICE_IOTRACE")) note(trace, action, path);
    if (pause_plan().phase == "io" && count_ == pause_plan().step) pause(pause_plan());
    if (crash_.at == count_) {
      if (crash_.torn && action == "write") return Io::torn;
      ::kill(::getpid(), SIGKILL);
    }
    if (meant(fail_, count_)) {
      error = fail_.error;
      return Io::fail;
    }
    return Io::none;
  }

 private:
  void refresh(const char* variable, Plan& plan, PlanKind kind) {
    const std::string text = text_of(variable);
    if (plan.text == text) return;
    plan = parse_plan(variable, text, kind);
    count_ = 0;
  }
  void note(const char* trace, const std::string& action, const std::string& path) const {
    const std::string line = fmt::format("{} {} {} {}\n", process_rank(), count_, action, path);
    const int fd = ::open(trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) return;
    if (::write(fd, line.data(), line.size()) < 0)
      ::close(fd);
    else
      ::close(fd);
  }

  std::mutex mutex_;
  Plan crash_, fail_;
  int64_t count_ = 0;
};

}  // namespace

int process_rank() {
  static const int rank = [] {
    for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"})
      if (const char* text = std::getenv(variable)) return std::atoi(text);
    return 0;
  }();
  return rank;
}

Io before_operation(const std::string& action, const std::string& path, int& error) {
  static Operations operations;
  return operations.next(action, path, error);
}

void at(const char* phase, int64_t step) {
  if (const Pause& p = pause_plan();
      !p.phase.empty() && p.phase == phase && (p.step == step || p.phase == "init"))
    pause(p);
  static const Point quit = parse_point("SLUICE_EXIT", true), hang = parse_point("SLUICE_HANG", false),
                     slow = parse_point("SLUICE_SLOW", false),
                     no_memory = parse_point("SLUICE_NOMEMORY", false);
  if (slow.step > 0 && std::strcmp(phase, "data") == 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(slow.step));
  if (std::strcmp(phase, "step") != 0) return;
  if (no_memory.step == step) throw std::bad_alloc();
  if (quit.step == step) ::_exit(static_cast<int>(quit.code));
  if (hang.step == step)
    for (std::atomic<int64_t> turns{0};;) ++turns;
}

bool thread_fails() {
  static std::mutex mutex;
  static Plan plan;
  static int64_t count = 0;
  const std::lock_guard lock(mutex);
  if (const std::string text = text_of("SLUICE_THREADFAIL"); text != plan.text) {
    plan = parse_plan("SLUICE_THREADFAIL", text, PlanKind::thread_failure);
    count = 0;
  }
  return meant(plan, ++count);
}

bool mismatched(int64_t step) {
  static const Point point = parse_point("SLUICE_MISMATCH", false);
  return point.step == step;
}

Flip flip(int rank, int64_t step) {
  const std::string text = text_of("SLUICE_FLIP");
  if (text.empty()) return {};
  const std::vector<std::string> words = split(text);
  if (words.size() != 5 || words[2].empty() || !is_number(words[0]) || !is_number(words[1]) ||
      !is_number(words[3]) || !is_number(words[4]))
    refuse("SLUICE_FLIP", text, "RANK:step:NAME:element:bit");
  if (number(words[0]) != rank || number(words[1]) != step) return {};
  return {words[2], number(words[3]), number(words[4])};
}

}  // namespace sluice::faults
