#pragma once
// Helpers for tests of the emulator: launches without a Context, memory of the fake device, errors as text.
#include <string>
#include <vector>

#include "common/ptx.cuh"

namespace sluice::cuda {

/// Global memory for kernels, initialised to 0xff.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t n) : n_(n) { cudaMalloc(reinterpret_cast<void**>(&data_), n * sizeof(T)); }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    cudaMemcpy(data_, host.data(), n_ * sizeof(T), cudaMemcpyHostToDevice);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> copy(n_);
    cudaMemcpy(copy.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost);
    return copy;
  }

 private:
  T* data_ = nullptr;
  size_t n_;
};

/// A block, or several, of so many threads.
inline emu::LaunchParams shape(dim3 grid, dim3 block, size_t smem = 0, const char* name = "test") {
  emu::LaunchParams p;
  p.grid = grid, p.block = block, p.dyn_smem = smem, p.name = name;
  return p;
}

/// Text of the LaunchError that f throws; empty if it throws none.
template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const emu::LaunchError& e) {
    return e.what();
  }
  return {};
}

/// Restores the schedule.
class WithSeed {
 public:
  explicit WithSeed(uint64_t seed) : before_(emu::seed()) { emu::set_seed(seed); }
  ~WithSeed() { emu::set_seed(before_); }
  WithSeed(const WithSeed&) = delete;

 private:
  uint64_t before_;
};

/// A bf16 tensor (rows, columns) with the 128-byte swizzle, unless said.
inline TensorMap map_2d(const void* base, uint64_t rows, uint64_t columns, uint32_t box_rows,
                        uint32_t box_columns, int swizzle = 128) {
  TensorMap m{};
  m.base = static_cast<char*>(const_cast<void*>(base));
  m.rank = 2, m.esize = 2, m.swizzle = swizzle, m.magic = emu::kTensorMapMagic;
  m.dim[0] = columns, m.dim[1] = rows;
  m.stride[0] = 2, m.stride[1] = columns * 2;
  m.box[0] = box_columns, m.box[1] = box_rows;
  return m;
}

}  // namespace sluice::cuda
