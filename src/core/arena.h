#pragma once
// An arena owns one block of memory, in which every allocation has a name. With capacity 0 it only measures:
// tensors have shapes but no data, and high_water() is the capacity that a real arena needs.
#include <deque>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace sluice {

class Arena {
 public:
  struct Entry {
    std::string name;
    Tensor tensor;
    int64_t offset;
  };

  /// capacity in bytes; 0 = measure only. Memory is zeroed. Throws Error(out_of_memory) with name and size.
  explicit Arena(std::string name, int64_t capacity = 0, Device device = Device::cpu)
      : Arena(std::move(name), capacity, device, /*pinned=*/false) {}
  /// Pinned host memory, which a GPU can copy from and to while it computes.
  static Arena pinned(std::string name, int64_t capacity) {
    return Arena(std::move(name), capacity, Device::cpu, true);
  }
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&&) = delete;

  /// Allocates a tensor, aligned to 64 bytes on a CPU and to 256 on a GPU. A real arena throws
  /// Error(internal) when it is full.
  Tensor alloc(const std::string& tensor_name, DType dtype, std::initializer_list<int64_t> dims);
  /// The same, but without an entry in the table or a copy of the name (which must outlive the tensor): for
  /// temporaries within a step, where host memory must not be allocated.
  Tensor alloc_temporary(const char* tensor_name, DType dtype, std::initializer_list<int64_t> dims);

  int64_t mark() const { return used_; }
  void rewind(int64_t mark);

  bool measuring() const { return block_ == nullptr; }
  Device device() const { return device_; }
  const std::string& name() const { return name_; }
  int64_t used() const { return used_; }
  int64_t high_water() const { return high_water_; }
  int64_t capacity() const { return capacity_; }
  /// Named entries, in order of allocation (temporaries are not listed).
  const std::deque<Entry>& entries() const { return entries_; }

 private:
  Arena(std::string name, int64_t capacity, Device device, bool pinned);
  int64_t take(int64_t bytes, const char* what);

  std::string name_;
  Device device_;
  bool pinned_ = false;
  int64_t capacity_ = 0, used_ = 0, high_water_ = 0;
  char* block_ = nullptr;
  std::deque<Entry> entries_;
};

/// Temporaries of one scope: allocated from an arena and released on destruction.
class ScratchScope {
 public:
  explicit ScratchScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ScratchScope() { arena_.rewind(mark_); }
  ScratchScope(const ScratchScope&) = delete;
  ScratchScope& operator=(const ScratchScope&) = delete;

  Tensor alloc(const char* name, DType dtype, std::initializer_list<int64_t> dims) {
    return arena_.alloc_temporary(name, dtype, dims);
  }
  /// A temporary of the same shape and dtype.
  Tensor like(const char* name, const Tensor& t);

 private:
  Arena& arena_;
  int64_t mark_;
};

}  // namespace sluice
