#pragma once
// Arena: owns one block of memory; everything in it has a name. Capacity 0 measures only: tensors come back
// with shapes but without data, and high_water() tells what a real arena needs.
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
  /// Host memory that a GPU can copy from and to while it computes.
  static Arena pinned(std::string name, int64_t capacity) {
    return Arena(std::move(name), capacity, Device::cpu, true);
  }
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&&) = delete;

  /// A tensor aligned to 64 bytes, on a GPU to 256. A real arena throws Error(internal) when it is full.
  Tensor alloc(const std::string& tensor_name, DType dtype, std::initializer_list<int64_t> dims);
  /// The same, without an entry in the table and without copying the name (which must outlive the tensor):
  /// for temporaries inside the step, which may not allocate host memory.
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

/// Temporaries of one scope: allocated from an arena, given back on destruction.
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
