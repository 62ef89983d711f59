// Device memory: host memory that is initialised to 0xff and ends at an inaccessible page (plain builds) or
// in a sanitizer's red zone. Copies are checked against the allocations in which they start.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "fake_runtime.h"
#include "sanitizer.h"

namespace emu {
namespace {

constexpr size_t kAlignment = 256;  // of cudaMalloc
constexpr size_t kPage = 4096;
constexpr bool kGuardPages = !EMU_ASAN && !EMU_TSAN;
constexpr unsigned char kFresh = 0xff;

struct Allocation {
  size_t bytes, mapped;
  char* mapping;
  Memory memory;
};

struct Heap {
  std::mutex mutex;
  std::map<char*, Allocation> allocations;
  size_t device_bytes = 0;
};
Heap& heap() {
  static Heap* h = new Heap;
  return *h;
}

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

char* reserve(Allocation& a) {
  const size_t padded = round_up(a.bytes, kAlignment);
  char* p;
  if (kGuardPages) {
    a.mapped = round_up(padded, kPage) + kPage;
    void* mapping = mmap(nullptr, a.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return nullptr;
    a.mapping = static_cast<char*>(mapping);
    mprotect(a.mapping + a.mapped - kPage, kPage, PROT_NONE);
    p = a.mapping + a.mapped - kPage - padded;
  } else {
    p = a.mapping = static_cast<char*>(std::aligned_alloc(kAlignment, padded));
    if (!p) return nullptr;
  }
  std::memset(p, kFresh, padded);
  san::forbid(p + a.bytes, padded - a.bytes);
  return p;
}

/// False if bytes after the end of the allocation were written.
bool give_back(char* p, const Allocation& a) {
  const size_t padded = round_up(a.bytes, kAlignment);
  san::allow(p, padded);
  bool intact = true;
  for (size_t i = a.bytes; i < padded; ++i) intact &= static_cast<unsigned char>(p[i]) == kFresh;
  if (kGuardPages)
    munmap(a.mapping, a.mapped);
  else
    std::free(a.mapping);
  return intact;
}

cudaError_t allocate(void** p, size_t bytes, Memory memory) {
  if (!p) return result(cudaErrorInvalidValue);
  *p = nullptr;
  if (forbidden_in_capture()) return result(cudaErrorStreamCaptureUnsupported);
  if (bytes == 0) return result(cudaSuccess);
  Heap& h = heap();
  Allocation a{bytes, 0, nullptr, memory};
  char* address = bytes > (size_t{1} << 46) ? nullptr : reserve(a);
  if (!address) return result(cudaErrorMemoryAllocation);
  const std::lock_guard lock(h.mutex);
  h.allocations[address] = a;
  if (memory == Memory::device) h.device_bytes += bytes;
  *p = address;
  return result(cudaSuccess);
}

cudaError_t release(void* p, Memory memory) {
  if (!p) return result(cudaSuccess);
  if (forbidden_in_capture()) return result(cudaErrorStreamCaptureUnsupported);
  finish_own_streams();
  Heap& h = heap();
  const std::lock_guard lock(h.mutex);
  const auto found = h.allocations.find(static_cast<char*>(p));
  if (found == h.allocations.end() || found->second.memory != memory) return result(cudaErrorInvalidValue);
  const Allocation a = found->second;
  h.allocations.erase(found);
  if (memory == Memory::device) h.device_bytes -= a.bytes;
  return result(give_back(static_cast<char*>(p), a) ? cudaSuccess : cudaErrorIllegalAddress);
}

bool fits_kind(cudaMemcpyKind kind, Memory dst, Memory src) {
  const bool to_device = dst == Memory::device, from_device = src == Memory::device;
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

cudaError_t check_copy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, bool& pageable) {
  Memory to, from;
  if (!find_memory(dst, bytes, to) || !find_memory(src, bytes, from)) return cudaErrorInvalidValue;
  if (!fits_kind(kind, to, from)) return cudaErrorInvalidValue;
  pageable = to == Memory::pageable || from == Memory::pageable;
  return cudaSuccess;
}

cudaError_t check_set(void* p, size_t bytes) {
  Memory memory;
  return find_memory(p, bytes, memory) && memory != Memory::pageable ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

bool find_memory(const void* p, size_t bytes, Memory& memory) {
  Heap& h = heap();
  const std::lock_guard lock(h.mutex);
  memory = Memory::pageable;
  char* address = static_cast<char*>(const_cast<void*>(p));
  auto after = h.allocations.upper_bound(address);
  if (after == h.allocations.begin()) return true;
  const auto& [begin, a] = *--after;
  if (address >= begin + a.bytes) return true;
  memory = a.memory;
  return address + bytes <= begin + a.bytes;
}

size_t device_bytes_in_use() {
  const std::lock_guard lock(heap().mutex);
  return heap().device_bytes;
}

}  // namespace emu

using emu::Memory;
using emu::result;

extern "C" {

cudaError_t cudaMalloc(void** p, size_t bytes) { return emu::allocate(p, bytes, Memory::device); }
cudaError_t cudaFree(void* p) { return emu::release(p, Memory::device); }
cudaError_t cudaMallocHost(void** p, size_t bytes) { return emu::allocate(p, bytes, Memory::pinned); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  return emu::allocate(p, bytes, Memory::pinned);
}
cudaError_t cudaFreeHost(void* p) { return emu::release(p, Memory::pinned); }

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  bool pageable = false;
  if (const cudaError_t e = emu::check_copy(dst, src, bytes, kind, pageable)) return result(e);
  if (pageable && emu::capture_of(stream)) {
    emu::capture_of(stream)->invalid = true;
    return result(cudaErrorStreamCaptureUnsupported);
  }
  if (pageable) {  // the call returns when it is done
    emu::finish(stream, emu::enqueued(stream));
    std::memmove(dst, src, bytes);
    return result(cudaSuccess);
  }
  return result(emu::enqueue(stream, [=] { std::memmove(dst, src, bytes); }));
}

cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind) {
  bool pageable = false;
  if (emu::forbidden_in_capture()) return result(cudaErrorStreamCaptureUnsupported);
  if (const cudaError_t e = emu::check_copy(dst, src, bytes, kind, pageable)) return result(e);
  std::memmove(dst, src, bytes);
  return result(cudaSuccess);
}

cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  if (width > dst_pitch || width > src_pitch) return result(cudaErrorInvalidPitchValue);
  for (size_t row = 0; row < height; ++row)
    if (const cudaError_t e =
            cudaMemcpyAsync(static_cast<char*>(dst) + row * dst_pitch,
                            static_cast<const char*>(src) + row * src_pitch, width, kind, stream))
      return e;
  return result(cudaSuccess);
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  if (const cudaError_t e = emu::check_set(p, bytes)) return result(e);
  return result(emu::enqueue(stream, [=] { std::memset(p, value, bytes); }));
}

cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  if (emu::forbidden_in_capture()) return result(cudaErrorStreamCaptureUnsupported);
  if (const cudaError_t e = emu::check_set(p, bytes)) return result(e);
  std::memset(p, value, bytes);
  return result(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
  if (!attributes) return result(cudaErrorInvalidValue);
  Memory memory;
  emu::find_memory(p, 0, memory);
  *attributes = {};
  attributes->type = memory == Memory::device   ? cudaMemoryTypeDevice
                     : memory == Memory::pinned ? cudaMemoryTypeHost
                                                : cudaMemoryTypeUnregistered;
  if (memory != Memory::pageable) attributes->devicePointer = const_cast<void*>(p);
  if (memory != Memory::device) attributes->hostPointer = const_cast<void*>(p);
  return result(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  if (!free_bytes || !total_bytes) return result(cudaErrorInvalidValue);
  *total_bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t used = emu::device_bytes_in_use();
  *free_bytes = used < *total_bytes ? *total_bytes - used : 0;
  return result(cudaSuccess);
}

}  // extern "C"
