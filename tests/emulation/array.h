#pragma once
// Growing arrays for use inside a kernel. Their memory comes from an arena of the OS thread and is never
// freed, so that no allocator that a sanitizer intercepts is called between two CUDA threads.
#include <cstddef>
#include <type_traits>

#include "sanitizer.h"

namespace emu {

void* arena_alloc(size_t size);  // 64-byte aligned, zero

template <class T>
class Array {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  unsigned size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t i) { return data_[i]; }
  T& back() { return data_[size_ - 1]; }
  void clear() { size_ = 0; }
  /// Keeps the first n.
  void truncate(unsigned n) { size_ = n; }
  void push_back(const T& value) {
    if (size_ == capacity_) grow();
    san::copy(static_cast<void*>(data_ + size_++), &value, sizeof value);
  }
  T pop_back() { return data_[--size_]; }
  void erase_front(unsigned n) {
    for (unsigned i = n; i < size_; ++i) san::copy(static_cast<void*>(data_ + i - n), data_ + i, sizeof(T));
    size_ -= n;
  }

 private:
  void grow() {
    const unsigned capacity = capacity_ ? 2 * capacity_ : 8;
    T* data = static_cast<T*>(arena_alloc(capacity * sizeof(T)));
    if (size_) san::copy(static_cast<void*>(data), data_, size_ * sizeof(T));
    data_ = data, capacity_ = capacity;
  }

  T* data_ = nullptr;
  unsigned size_ = 0, capacity_ = 0;
};

}  // namespace emu
