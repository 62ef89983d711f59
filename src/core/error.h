#pragma once
// The only exception type. It is caught in main, which prints its message once and exits with a documented
// code.
#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace sluice {

/// Exit codes of the program (sysexits where one fits).
enum class ExitCode : int {
  ok = 0,
  usage = 64,          // configuration or command line
  data = 65,           // bad data, or checkpoints exist but none is valid
  no_input = 66,       // a named input is missing
  internal = 70,       // a bug: a contract was violated
  out_of_memory = 71,  //
  cannot_create = 73,  // output file or folder
  save_failed = 74,    // the final checkpoint could not be written
  preempted = 75,      // stopped by a signal after saving; run again to resume
  hang = 76,           // a peer was lost
  numeric = 78,        // the budget of non-finite steps is used up
  corruption = 79,     // replicas or replays disagree
};

class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

/// Throws an Error with a formatted message.
template <class... Args>
[[noreturn]] void fail(ExitCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace sluice

/// Contract check, always on: SLUICE_CHECK(ok, "linear_forward: weight must be {}, got {}", a, b).
#define SLUICE_CHECK(condition, ...)                                             \
  do {                                                                           \
    if (!(condition)) ::sluice::fail(::sluice::ExitCode::internal, __VA_ARGS__); \
  } while (false)
