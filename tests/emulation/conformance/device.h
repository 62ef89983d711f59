#pragma once
// Runs a conformance kernel and fetches its output, on a GPU or under emulation. For .cu files only.
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "common/ptx.cuh"
#include "conformance.h"

namespace sluice::conformance {

inline void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "conformance: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

/// Device memory of the words, given or all ones.
class Words {
 public:
  explicit Words(size_t n) : Words(std::vector<uint32_t>(n, 0xffffffffu)) {}
  explicit Words(const std::vector<uint32_t>& host) : n_(host.size()) {
    require(cudaMalloc(reinterpret_cast<void**>(&data_), n_ * 4), "cudaMalloc");
    require(cudaMemcpy(data_, host.data(), n_ * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~Words() { cudaFree(data_); }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;
  uint32_t* get() const { return data_; }
  std::vector<uint32_t> host() const {
    std::vector<uint32_t> copy(n_);
    require(cudaMemcpy(copy.data(), data_, n_ * 4, cudaMemcpyDeviceToHost), "a kernel");
    return copy;
  }

 private:
  uint32_t* data_ = nullptr;
  size_t n_;
};

/// Clusters of so many blocks.
template <class... P, class... A>
void run_in_clusters(unsigned cluster, void (*kernel)(P...), unsigned blocks, unsigned threads, size_t smem,
                     A&&... args) {
#ifdef SLUICE_EMULATION
  emu::LaunchParams params;
  params.grid = dim3(blocks), params.block = dim3(threads), params.cluster = dim3(cluster),
  params.dyn_smem = smem, params.name = "conformance";
  emu::launch(params, kernel, static_cast<P>(args)...);
#else
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)),
          "cudaFuncSetAttribute");
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute[1];
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = smem;
  config.attrs = attribute;
  if (cluster > 1) {
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = cluster;
    attribute[0].val.clusterDim.y = attribute[0].val.clusterDim.z = 1;
    config.numAttrs = 1;
  }
  require(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...), "launch");
#endif
}
template <class... P, class... A>
void run(void (*kernel)(P...), unsigned blocks, unsigned threads, size_t smem, A&&... args) {
  run_in_clusters(1, kernel, blocks, threads, smem, static_cast<A&&>(args)...);
}

/// moved(0), moved(1), ... as pairs.
inline std::vector<uint32_t> moved_words(int elements) {
  std::vector<uint32_t> words(static_cast<size_t>(elements / 2));
  for (int i = 0; i < elements / 2; ++i)
    words[static_cast<size_t>(i)] = moved(2 * i) | static_cast<uint32_t>(moved(2 * i + 1)) << 16;
  return words;
}

}  // namespace sluice::conformance
