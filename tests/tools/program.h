#pragma once
// Runs the program as a user does: arguments, environment, exit code, output.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "core/io.h"
#include "data/temporary.h"

namespace sluice::test {

struct Outcome {
  int code = -1;  // 128 + signal when killed
  std::string out, err;
  int64_t peak_bytes = 0;  // peak resident memory; the largest one of several ranks
};

/// A running program, or several ranks of it under mpirun. Its output goes to files in `folder`.
class Program {
 public:
  Program(const std::string& folder, const std::vector<std::string>& arguments,
          const std::map<std::string, std::string>& environment = {}, int ranks = 0)
      : out_(folder + "/stdout.txt"), err_(folder + "/stderr.txt") {
    const char* binary = std::getenv("SLUICE_BINARY");
    REQUIRE(binary);
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ > 0) return;
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    dup2(open(out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666), STDOUT_FILENO);
    dup2(open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666), STDERR_FILENO);
    const std::string launcher = SLUICE_SOURCE_DIR "/tests/support/mpirun", count = std::to_string(ranks);
    std::vector<char*> argv = {const_cast<char*>("sluice")};
    if (ranks > 0) {
      argv = {const_cast<char*>(launcher.c_str()), const_cast<char*>(count.c_str()),
              const_cast<char*>(binary)};
      binary = launcher.c_str();
    }
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    execv(binary, argv.data());
    _exit(127);
  }
  ~Program() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      wait();
    }
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void signal(int number) const { kill(pid_, number); }
  /// Whether it has ended; wait() returns the result.
  bool over() const {
    siginfo_t info{};
    return waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == pid_;
  }
  Outcome wait() {
    int status = 0;
    rusage usage{};
    wait4(pid_, &status, 0, &usage);
    pid_ = -1;
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), io::read_file(out_),
            io::read_file(err_), int64_t{1024} * usage.ru_maxrss};
  }

 private:
  std::string out_, err_;
  pid_t pid_ = -1;
};

inline bool wait_until(const std::function<bool()>& condition, double seconds = 60) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

}  // namespace sluice::test
