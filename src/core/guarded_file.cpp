#include "core/guarded_file.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>

namespace sluice::io {

/// A range of addresses. The signal handler may traverse the list at any time, so entries are reused and
/// never freed.
struct GuardedFile::Watch {
  std::atomic<uintptr_t> begin{0}, end{0};  // end 0: the entry is free
  std::atomic<bool> lost{false};
  Watch* next = nullptr;

  static std::atomic<Watch*> first;
  static std::mutex mutex;  // for adding and removing entries
  static struct sigaction previous;
  static uintptr_t page_bytes;

  static void on_bus_error(int number, siginfo_t* info, void*);
  static void install();
  static Watch* add(const MappedFile& file);
};

std::atomic<GuardedFile::Watch*> GuardedFile::Watch::first{nullptr};
std::mutex GuardedFile::Watch::mutex;
struct sigaction GuardedFile::Watch::previous;
uintptr_t GuardedFile::Watch::page_bytes = 4096;

/// Maps zeros from the page that was read to the end of the mapping and lets the reader continue. The reader
/// may be any thread, inside a parallel region or a library, so a jump out of it is not possible; it checks
/// `lost` afterwards.
void GuardedFile::Watch::on_bus_error(int number, siginfo_t* info, void*) {
  const int error = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (Watch* w = info->si_code > 0 ? first.load() : nullptr; w;
       w = w->next) {  // si_code > 0: sent by the kernel, with an address
    const uintptr_t end = w->end.load();
    if (address < w->begin.load() || address >= end) continue;
    const uintptr_t page = address / page_bytes * page_bytes;
    void* zeros = ::mmap(reinterpret_cast<void*>(page), end - page, PROT_READ,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (zeros == MAP_FAILED) break;
    w->lost = true;
    errno = error;
    return;
  }
  // Not ours: it ends as it would without this handler, an access when it is repeated, a signal that somebody
  // sent when it is sent again.
  ::sigaction(number, &previous, nullptr);
  if (info->si_code <= 0) ::raise(number);
}

void GuardedFile::Watch::install() {
  page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  ::sigaction(SIGBUS, &action, &previous);
}

GuardedFile::Watch* GuardedFile::Watch::add(const MappedFile& file) {
  const std::scoped_lock lock(mutex);
  Watch* w = first;
  if (!w) install();
  while (w && w->end != 0) w = w->next;
  const bool known = w != nullptr;
  if (!known) w = new Watch;
  w->lost = false;
  w->begin = reinterpret_cast<uintptr_t>(file.data());
  w->end = w->begin + static_cast<uintptr_t>(std::max<int64_t>(file.size(), 1));
  if (!known) {
    w->next = first;
    first = w;
  }
  return w;
}

void GuardedFile::WatchEnd::operator()(Watch* watch) const {
  const std::scoped_lock lock(Watch::mutex);
  watch->end = 0;
}

namespace {

bool inspect(const std::string& path, FileIdentity& identity, int64_t& size) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return false;
  identity = {static_cast<uint64_t>(info.st_dev), static_cast<uint64_t>(info.st_ino), info.st_mtime};
  size = info.st_size;
  return true;
}

}  // namespace

GuardedFile::GuardedFile(const std::string& path) : file_(path) {
  int64_t size = 0;
  inspect(path, identity_, size);
  watch_.reset(Watch::add(file_));
  lost_ = &watch_->lost;
}

/// A file renamed onto this path is another file and does not affect this mapping.
bool GuardedFile::shorter() const {
  FileIdentity now;
  int64_t size = 0;
  return inspect(path(), now, size) && now.same_file(identity_) && size < file_.size();
}

void GuardedFile::fail_lost() const {
  if (!shorter())
    fail(ExitCode::data,
         "{}: can no longer be read: input/output error, or the file was removed and truncated", path());
  fail(ExitCode::data,
       "{}: was truncated while in use: it had {} bytes and now has {}. Token files must not change while "
       "they are read. Restore the file, then run the same command again",
       path(), file_.size(), file_size(path()));
}

}  // namespace sluice::io
