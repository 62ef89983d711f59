#pragma once
// Annotations for the sanitizers. AddressSanitizer: which parts of shared memory are valid, and which stack
// is in use. ThreadSanitizer: every CUDA thread as a separate fiber, an acquire and a release wherever CUDA
// synchronises, and the memory accesses of asynchronous engines. The runtime itself is compiled without
// -fsanitize=thread, so only these annotations count, and its copies must not use memcpy, which libtsan
// intercepts.
#include <cstddef>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define EMU_ASAN 0
#endif

#ifdef SLUICE_EMULATION_TSAN
#define EMU_TSAN 1
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, size_t size);
void __tsan_write_range(void* address, size_t size);
int __tsan_atomic32_load(const volatile int* address, int order);
int __tsan_atomic32_compare_exchange_strong(volatile int* address, int* expected, int value, int order,
                                            int failure);
}
#else
#define EMU_TSAN 0
#endif

namespace emu::san {

/// Everything released on `key` before, by any thread, happens before later actions of this thread.
inline void acquire([[maybe_unused]] const void* key) {
#if EMU_TSAN
  __tsan_acquire(const_cast<void*>(key));
#endif
}
inline void release([[maybe_unused]] const void* key) {
#if EMU_TSAN
  __tsan_release(const_cast<void*>(key));
#endif
}
inline void reads([[maybe_unused]] const void* p, [[maybe_unused]] size_t size) {
#if EMU_TSAN
  if (size) __tsan_read_range(const_cast<void*>(p), size);
#endif
}
inline void writes([[maybe_unused]] const void* p, [[maybe_unused]] size_t size) {
#if EMU_TSAN
  if (size) __tsan_write_range(const_cast<void*>(p), size);
#endif
}

inline void forbid([[maybe_unused]] const void* p, [[maybe_unused]] size_t size) {
#if EMU_ASAN
  __asan_poison_memory_region(p, size);
#endif
}
inline void allow([[maybe_unused]] const void* p, [[maybe_unused]] size_t size) {
#if EMU_ASAN
  __asan_unpoison_memory_region(p, size);
#endif
}
/// The first inaccessible byte of the range, or null.
inline const void* first_forbidden([[maybe_unused]] const void* p, [[maybe_unused]] size_t size) {
#if EMU_ASAN
  return size ? __asan_region_is_poisoned(const_cast<void*>(p), size) : nullptr;
#else
  return nullptr;
#endif
}

/// memcpy and memset without instrumentation.
inline void copy(void* dst, const void* src, size_t size) {
#if EMU_TSAN
  asm volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(size)::"memory");
#else
  std::memcpy(dst, src, size);
#endif
}
inline void set(void* dst, unsigned char value, size_t size) {
#if EMU_TSAN
  asm volatile("rep stosb" : "+D"(dst), "+c"(size) : "a"(value) : "memory");
#else
  std::memset(dst, value, size);
#endif
}

}  // namespace emu::san
