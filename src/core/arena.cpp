#include "core/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#if defined(SLUICE_HAS_CUDA)
#include "core/cuda_backend.h"
#endif

namespace sluice {
namespace {

/// More than any machine has, and so little that sums over all arenas do not overflow.
constexpr int64_t kMostBytes = int64_t{1} << 58;

/// Bytes of a tensor; kMostBytes + 1 where there are more.
int64_t bytes_of(DType dtype, std::initializer_list<int64_t> dims) {
  int64_t bytes = dtype_size(dtype);
  for (const int64_t dim : dims)
    if (__builtin_mul_overflow(bytes, dim, &bytes)) return kMostBytes + 1;
  return std::min(bytes, kMostBytes + 1);
}

}  // namespace

Arena::Arena(std::string name, int64_t capacity, Device device, bool pinned)
    : name_(std::move(name)), device_(device), pinned_(pinned), capacity_(capacity) {
  SLUICE_CHECK(capacity >= 0, "arena {}: capacity {}", name_, capacity);
#if !defined(SLUICE_HAS_CUDA)
  SLUICE_CHECK(capacity == 0 || (device == Device::cpu && !pinned),
               "arena {}: this build has no CUDA backend; device must be cpu", name_);
#endif
  if (capacity == 0) return;
  void* p = nullptr;
#if defined(SLUICE_HAS_CUDA)
  if (device == Device::cuda)
    p = cuda::allocate(capacity);
  else if (pinned)
    p = cuda::allocate_pinned(capacity);
#endif
  if (device == Device::cpu && !pinned) {
    // mmap gives zeroed, page-aligned memory, which returns to the system as one piece.
    p = mmap(nullptr, static_cast<size_t>(capacity), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
             0);
    if (p == MAP_FAILED)
      p = nullptr;
    else
      madvise(p, static_cast<size_t>(capacity), MADV_HUGEPAGE);
  }
  if (!p)
    fail(ExitCode::out_of_memory, "out of {}memory: arena '{}' needs {:.2f} GiB",
         device == Device::cuda ? "GPU " : "", name_, static_cast<double>(capacity) / (1 << 30));
  block_ = static_cast<char*>(p);
}

Arena::~Arena() {
  if (!block_) return;
#if defined(SLUICE_HAS_CUDA)
  if (device_ == Device::cuda)
    cuda::release(block_);
  else if (pinned_)
    cuda::release_pinned(block_);
  else
#endif
    munmap(block_, static_cast<size_t>(capacity_));
}

Arena::Arena(Arena&& other) noexcept
    : name_(std::move(other.name_)),
      device_(other.device_),
      pinned_(other.pinned_),
      capacity_(other.capacity_),
      used_(other.used_),
      high_water_(other.high_water_),
      block_(std::exchange(other.block_, nullptr)),
      entries_(std::move(other.entries_)) {}

int64_t Arena::take(int64_t bytes, const char* what) {
  const int64_t begin = used_;
  // A cache line on a CPU; on a GPU more than vector and bulk copies require.
  const int64_t alignment = device_ == Device::cuda ? 256 : 64;
  const int64_t padded = (bytes + alignment - 1) / alignment * alignment;
  if (padded > kMostBytes - begin)
    fail(ExitCode::usage,
         "arena {}: with {} more than 2^58 bytes (256 PiB) would be needed; the model, data.seq_len or "
         "train.micro_batch_size is too large",
         name_, what);
  SLUICE_CHECK(measuring() || begin + padded <= capacity_, "arena {}: {} needs {} bytes, {} of {} are free",
               name_, what, padded, capacity_ - begin, capacity_);
  used_ = begin + padded;
  high_water_ = std::max(high_water_, used_);
  return begin;
}

Tensor Arena::alloc(const std::string& tensor_name, DType dtype, std::initializer_list<int64_t> dims) {
  Tensor t(nullptr, dtype, dims, "", device_);
  const int64_t offset = take(bytes_of(dtype, dims), tensor_name.c_str());
  if (block_) t.data = block_ + offset;
  entries_.push_back({tensor_name, t, offset});
  t.name = entries_.back().name.c_str();
  entries_.back().tensor.name = t.name;
  return t;
}

Tensor Arena::alloc_temporary(const char* tensor_name, DType dtype, std::initializer_list<int64_t> dims) {
  Tensor t(nullptr, dtype, dims, tensor_name, device_);
  const int64_t offset = take(bytes_of(dtype, dims), tensor_name);
  if (block_) t.data = block_ + offset;
  return t;
}

void Arena::rewind(int64_t mark) {
  used_ = mark;
  while (!entries_.empty() && entries_.back().offset >= mark) entries_.pop_back();
}

Tensor ScratchScope::like(const char* name, const Tensor& t) {
  Tensor r = t;
  const Tensor flat = arena_.alloc_temporary(name, t.dtype, {t.numel()});
  r.data = flat.data;
  r.row_stride = 0;
  r.name = name;
  return r;
}

}  // namespace sluice
