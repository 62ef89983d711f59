// Readers map files. AddressSanitizer does not know where a mapping ends: the rest of its last page reads as
// zeros, and what lies behind may be mapped, too. The programs are linked with --wrap=mmap and --wrap=munmap,
// and here what follows a file's last byte is made inaccessible.
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

namespace {

size_t whole_pages(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

}  // namespace

extern "C" {

void* __real_mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset);
int __real_munmap(void* at, size_t bytes);

void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
  if (at) return __real_mmap(at, bytes, protection, flags, file, offset);
  const size_t pages = whole_pages(bytes);
  void* room = __real_mmap(nullptr, pages + whole_pages(1), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) return room;
  if (__real_mmap(room, bytes, protection, flags | MAP_FIXED, file, offset) == MAP_FAILED) {
    __real_munmap(room, pages + whole_pages(1));
    return MAP_FAILED;
  }
  __asan_poison_memory_region(static_cast<char*>(room) + bytes, pages - bytes);
  return room;
}

int __wrap_munmap(void* at, size_t bytes) {
  const size_t pages = whole_pages(bytes);
  __asan_unpoison_memory_region(at, pages);
  return __real_munmap(at, pages + whole_pages(1));
}

}  // extern "C"
