#pragma once
// Tensor maps describe a tensor of bf16 or f32 in device memory for TMA. They are built on the host and
// passed to a kernel by value (const __grid_constant__ TensorMap). Boxes use the 128-byte swizzle, with rows
// of at most 128 bytes; elements outside of the tensor are read as zero and not written.
#include <cstdint>

#include "common/ptx.cuh"
#include "core/error.h"

namespace sluice::cuda {

/// Type of the elements; the value is their size in bytes.
enum class MapElement : int { bf16 = 2, f32 = 4 };

/// Sizes and strides in elements, starting with the contiguous dimension 0; stride[0] is 1 and not stored.
struct TensorMapShape {
  int rank;
  uint64_t size[3];
  uint64_t stride[2];
  uint32_t box[3];
  MapElement element = MapElement::bf16;
};

#ifdef SLUICE_EMULATION
inline TensorMap make_tensor_map(const char*, const void* base, const TensorMapShape& s) {
  TensorMap m{};
  m.base = static_cast<char*>(const_cast<void*>(base));
  m.rank = s.rank, m.esize = static_cast<int>(s.element), m.swizzle = 128, m.magic = 0x7a3d5eed;
  for (int i = 0; i < s.rank; ++i) {
    m.dim[i] = s.size[i];
    m.stride[i] = (i == 0 ? 1 : s.stride[i - 1]) * static_cast<uint64_t>(m.esize);
    m.box[i] = s.box[i];
  }
  return m;
}
#else
/// The driver function of this name, looked up at run time so that the program also starts without a driver.
template <class F>
F driver_function(const char* name) {
  void* p = nullptr;
  cudaDriverEntryPointQueryResult found = {};
  const cudaError_t e = cudaGetDriverEntryPointByVersion(name, &p, 12000, cudaEnableDefault, &found);
  if (e != cudaSuccess)
    fail(ExitCode::internal, "{}: {}: {}", name, cudaGetErrorName(e), cudaGetErrorString(e));
  if (found != cudaDriverEntryPointSuccess || !p)
    fail(ExitCode::internal, "{}: not available in this driver; CUDA 12.0 or later is needed", name);
  return reinterpret_cast<F>(p);
}

/// what: the tensor's name, for errors: "cuTensorMapEncodeTiled(q): CUDA_ERROR_INVALID_VALUE".
inline TensorMap make_tensor_map(const char* what, const void* base, const TensorMapShape& s) {
  static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  TensorMap m;
  const cuuint64_t size[3] = {s.size[0], s.size[1], s.size[2]};
  const auto bytes = static_cast<cuuint64_t>(s.element);
  const cuuint64_t stride[2] = {s.stride[0] * bytes, s.stride[1] * bytes};
  const cuuint32_t box[3] = {s.box[0], s.box[1], s.box[2]}, step[3] = {1, 1, 1};
  const CUresult e = encode(
      &m, s.element == MapElement::f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      static_cast<cuuint32_t>(s.rank), const_cast<void*>(base), size, stride, box, step,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (e != CUDA_SUCCESS) {
    static const auto name_of = driver_function<decltype(&cuGetErrorName)>("cuGetErrorName");
    const char* name = "unknown error";
    name_of(e, &name);
    fail(ExitCode::internal, "cuTensorMapEncodeTiled({}): {} (base {}, sizes {} {} {}, box {} {} {})", what,
         name, base, s.size[0], s.size[1], s.size[2], s.box[0], s.box[1], s.box[2]);
  }
  return m;
}
#endif

/// A matrix (rows, columns) with ld elements from row to row; boxes of box_rows x box_columns.
inline TensorMap make_tensor_map_2d(const char* what, const void* base, int64_t rows, int64_t columns,
                                    int64_t ld, int box_rows, int box_columns) {
  return make_tensor_map(what, base,
                         {2,
                          {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), 1},
                          {static_cast<uint64_t>(ld), 0},
                          {static_cast<uint32_t>(box_columns), static_cast<uint32_t>(box_rows), 1}});
}
/// A tensor (n2, n1, n0) with ld elements from one (n1, n0) to the next, 0: contiguous; boxes (b2, b1, b0),
/// coordinates in the order of dimension 0, 1, 2.
inline TensorMap make_tensor_map_3d(const char* what, const void* base, int64_t n2, int64_t n1, int64_t n0,
                                    int b2, int b1, int b0, MapElement element = MapElement::bf16,
                                    int64_t ld = 0) {
  if (ld == 0) ld = n0 * n1;
  return make_tensor_map(what, base,
                         {3,
                          {static_cast<uint64_t>(n0), static_cast<uint64_t>(n1), static_cast<uint64_t>(n2)},
                          {static_cast<uint64_t>(n0), static_cast<uint64_t>(ld)},
                          {static_cast<uint32_t>(b0), static_cast<uint32_t>(b1), static_cast<uint32_t>(b2)},
                          element});
}

}  // namespace sluice::cuda
