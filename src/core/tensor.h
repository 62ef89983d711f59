#pragma once
// A tensor is a view: row-major, contiguous, rank <= 4. It owns nothing and is copied freely.
// Gradient convention of all layers and ops: parameter gradients are accumulated; activation gradients are
// overwritten, or accumulated with `Into::add` where an input has several consumers.
#include <array>
#include <initializer_list>
#include <string>

#include "core/device.h"
#include "core/dtype.h"
#include "core/error.h"

namespace sluice {

/// Whether an op overwrites an activation gradient or adds to it.
enum class Into : uint8_t { overwrite, add };

struct Tensor {
  void* data = nullptr;  // null in measure mode (Context::dry_run), and when the tensor is absent (rank 0)
  DType dtype = DType::f32;
  Device device = Device::cpu;
  int rank = 0;
  std::array<int64_t, 4> shape{};
  const char* name = "";  // owned by the arena that allocated it

  Tensor() = default;
  Tensor(void* data_, DType dtype_, std::initializer_list<int64_t> dims, const char* name_ = "",
         Device device_ = Device::cpu);

  /// An absent optional argument is a default-constructed tensor.
  bool empty() const { return rank == 0; }
  explicit operator bool() const { return rank != 0; }
  int64_t dim(int i) const { return shape[static_cast<size_t>(i < 0 ? rank + i : i)]; }
  int64_t numel() const;
  int64_t bytes() const { return numel() * dtype_size(dtype); }
  bool has_shape(std::initializer_list<int64_t> dims) const;

  /// The same memory with another shape of equal element count.
  Tensor view(std::initializer_list<int64_t> dims) const;
  /// Rows [begin, begin + count) of the first dimension.
  Tensor rows(int64_t begin, int64_t count) const;

  template <class T>
  T* as() const {
    SLUICE_CHECK(dtype_of<T>::value == dtype, "tensor {}: asked for {}, holds {}", name,
                 dtype_name(dtype_of<T>::value), dtype_name(dtype));
    return static_cast<T*>(data);
  }

  /// "(4, 16) f32"
  std::string describe() const;
};

/// Contract check of shape and dtype with the op's and the argument's name in the message.
void check_tensor(const char* op, const char* argument, const Tensor& t, DType dtype,
                  std::initializer_list<int64_t> dims);

}  // namespace sluice
