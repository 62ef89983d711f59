#include "core/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace sluice {

FileLock::FileLock(const std::string& path, const std::string& held_message)
    // O_NONBLOCK: opening a pipe of that name would block.
    : file_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666)) {
  if (file_ < 0) fail(ExitCode::cannot_create, "cannot create {}: {}", path, std::strerror(errno));
  if (flock(file_, LOCK_EX | LOCK_NB) == 0) return;
  const int error = errno;
  close(file_);
  if (error == EWOULDBLOCK) fail(ExitCode::cannot_create, "{}", held_message);
  fail(ExitCode::cannot_create, "cannot lock {}: {}", path, std::strerror(error));
}

FileLock::~FileLock() { close(file_); }

}  // namespace sluice
