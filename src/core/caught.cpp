#include "core/caught.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <system_error>

namespace sluice {
namespace {

/// The value, in MiB, of a line "NAME: 123 kB" in /proc/self/status; -1 if it cannot be read. Allocates
/// nothing.
double megabytes(const char* name) {
  char text[4096];
  const int fd = ::open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  const ssize_t n = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  if (n <= 0) return -1;
  text[n] = '\0';
  const char* line = std::strstr(text, name);
  return line ? std::strtod(line + std::strlen(name), nullptr) / 1024 : -1;
}

}  // namespace

Error caught_error() {
  try {
    throw;
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return Error(ExitCode::out_of_memory,
                 fmt::format("out of memory: the process holds {:.0f} MiB ({:.0f} MiB of addresses)",
                             megabytes("VmRSS:"), megabytes("VmSize:")));
  } catch (const std::system_error& error) {
    return Error(ExitCode::internal, error.what());
  } catch (const std::exception& error) {
    return Error(ExitCode::internal, fmt::format("{} (this is a bug of sluice)", error.what()));
  } catch (...) {
    return Error(ExitCode::internal, "an exception of an unknown type (this is a bug of sluice)");
  }
}

}  // namespace sluice
