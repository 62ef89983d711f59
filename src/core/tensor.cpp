#include "core/tensor.h"

#include <algorithm>

namespace sluice {
namespace {

std::string shape_text(const int64_t* dims, int rank) {
  std::string text = "(";
  for (int i = 0; i < rank; ++i) text += fmt::format("{}{}", i ? ", " : "", dims[i]);
  return text + ")";
}

}  // namespace

Tensor::Tensor(void* data_, DType dtype_, std::initializer_list<int64_t> dims, const char* name_,
               Device device_)
    : data(data_), dtype(dtype_), device(device_), rank(static_cast<int>(dims.size())), name(name_) {
  SLUICE_CHECK(dims.size() >= 1 && dims.size() <= 4, "tensor {}: rank must be 1 to 4, got {}", name_,
               dims.size());
  std::copy(dims.begin(), dims.end(), shape.begin());
}

int64_t Tensor::numel() const {
  int64_t n = rank == 0 ? 0 : 1;
  for (int i = 0; i < rank; ++i) n *= shape[static_cast<size_t>(i)];
  return n;
}

bool Tensor::has_shape(std::initializer_list<int64_t> dims) const {
  return static_cast<size_t>(rank) == dims.size() && std::equal(dims.begin(), dims.end(), shape.begin());
}

Tensor Tensor::view(std::initializer_list<int64_t> dims) const {
  Tensor t(data, dtype, dims, name, device);
  SLUICE_CHECK(t.numel() == numel() && (contiguous() || t.shape[0] == shape[0]),
               "tensor {}: cannot view {} as {}", name, describe(), t.describe());
  t.row_stride = row_stride;
  return t;
}

Tensor Tensor::rows(int64_t begin, int64_t count) const {
  SLUICE_CHECK(rank >= 1 && begin >= 0 && count >= 0 && begin + count <= shape[0],
               "tensor {}: rows [{}, {}) of {}", name, begin, begin + count, describe());
  Tensor t = *this;
  t.shape[0] = count;
  if (data) t.data = static_cast<char*>(data) + begin * stride() * dtype_size(dtype);
  return t;
}

Tensor Tensor::columns(int64_t begin, int64_t count) const {
  SLUICE_CHECK(rank == 2 && begin >= 0 && count >= 0 && begin + count <= shape[1],
               "tensor {}: columns [{}, {}) of {}", name, begin, begin + count, describe());
  Tensor t = *this;
  if (count < shape[1]) t.row_stride = stride();
  t.shape[1] = count;
  if (data) t.data = static_cast<char*>(data) + begin * dtype_size(dtype);
  return t;
}

std::string Tensor::describe() const {
  const std::string text = shape_text(shape.data(), rank) + " " + dtype_name(dtype);
  return contiguous() ? text : fmt::format("{} with rows {} elements apart", text, row_stride);
}

void check_tensor(const char* op, const char* argument, const Tensor& t, DType dtype,
                  std::initializer_list<int64_t> dims) {
  SLUICE_CHECK(t.contiguous() && t.dtype == dtype && t.has_shape(dims), "{}: {} must be {} {}, got {}", op,
               argument, shape_text(dims.begin(), static_cast<int>(dims.size())), dtype_name(dtype),
               t.describe());
}

}  // namespace sluice
