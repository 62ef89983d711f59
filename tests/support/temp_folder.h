#pragma once
// Helpers for tests of files: a temporary folder, a temporary environment variable, a child process.
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <string>

#include "core/io.h"

namespace sluice {

/// A new folder, removed with its contents at the end.
struct TempFolder {
  std::string path;
  TempFolder() {
    const char* base = std::getenv("TMPDIR");
    // In memory if possible: hundreds of saves, each with a dozen fsyncs, would otherwise wait for a disk.
    const bool memory = io::is_directory("/dev/shm") && io::free_bytes("/dev/shm") > (int64_t{256} << 20);
    path = std::string(base ? base : memory ? "/dev/shm" : "/tmp") + "/sluice_test_XXXXXX";
    REQUIRE(::mkdtemp(path.data()));
  }
  ~TempFolder() {
    try {
      io::remove_tree(path);
    } catch (const Error&) {
    }
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  std::string operator/(const std::string& name) const { return path + "/" + name; }
};

/// Sets a variable for a scope.
struct TempVariable {
  const char* name;
  TempVariable(const char* name_, const std::string& value) : name(name_) {
    ::setenv(name, value.c_str(), 1);
  }
  ~TempVariable() { ::unsetenv(name); }
  TempVariable(const TempVariable&) = delete;
  TempVariable& operator=(const TempVariable&) = delete;
};

/// Runs body in a forked child process and returns its wait status. An Error in the child gives exit
/// status 1.
template <class Body>
int in_child(Body&& body) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    try {
      body();
    } catch (const Error&) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

}  // namespace sluice
