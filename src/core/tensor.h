#pragma once
// A tensor is a view: row-major, rank <= 4, and contiguous, except for columns of a matrix (Tensor::columns),
// which only the ops take that say so. It owns nothing and is copied freely.
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
  int64_t row_stride = 0;  // of columns: elements from one row, of the first dimension, to the next; else 0
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
  /// Columns [begin, begin + count) of a matrix, as (rows, count). Contiguous if they are all of them.
  Tensor columns(int64_t begin, int64_t count) const;
  bool contiguous() const { return row_stride == 0; }
  /// Elements from one row of the first dimension to the next.
  int64_t stride() const {
    return contiguous() ? (rank == 0 || shape[0] == 0 ? 0 : numel() / shape[0]) : row_stride;
  }

  /// The elements, one behind the other.
  template <class T>
  T* as() const {
    SLUICE_CHECK(contiguous(), "tensor {}: columns of a matrix, {}, are not contiguous", name, describe());
    return as_rows<T>();
  }
  /// The elements of rows that are stride() apart.
  template <class T>
  T* as_rows() const {
    SLUICE_CHECK(dtype_of<T>::value == dtype, "tensor {}: asked for {}, holds {}", name,
                 dtype_name(dtype_of<T>::value), dtype_name(dtype));
    return static_cast<T*>(data);
  }

  /// "(4, 16) f32"
  std::string describe() const;
};

/// Contract check of shape and dtype, of a contiguous tensor, with the op's and the argument's name in the
/// message.
void check_tensor(const char* op, const char* argument, const Tensor& t, DType dtype,
                  std::initializer_list<int64_t> dims);

}  // namespace sluice
