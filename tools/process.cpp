#include "process.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace sluice {

void open_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", O_RDWR) < 0)
      std::_Exit(70);  // the lowest free number: fd
}

void settle_threads(char** argv) {
  bool changed = false;
  const auto settle = [&](const char* name, const char* value) {
    if (!std::getenv(name)) changed |= setenv(name, value, 0) == 0;
  };
  if (!std::getenv("OMP_WAIT_POLICY")) settle("GOMP_SPINCOUNT", "1000");
  settle("OPENBLAS_NUM_THREADS", "1");
  settle("OMPI_MCA_mpi_yield_when_idle", "1");
  std::array<char, PATH_MAX> path{};
  if (changed && readlink("/proc/self/exe", path.data(), path.size() - 1) > 0)
    execv(path.data(), argv);  // returns only on failure
}

bool flush_standard_output(const char** problem) {
  errno = 0;
  const bool failed = std::fflush(stdout) != 0 || std::ferror(stdout);
  if (!failed || errno == EPIPE) return true;
  *problem = errno ? std::strerror(errno) : "a write has failed";
  return false;
}

}  // namespace sluice
