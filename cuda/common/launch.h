#pragma once
// Host side of kernels: the backend's state in a Context, checked launches, error messages with names.
#include <utility>

#include "common/device.cuh"
#include "core/context.h"

namespace sluice::cuda {

/// State of the CUDA backend in a Context. Created on first use, on the current device.
struct State;

/// Errors that kernels report without stopping: one word in device memory, read at every synchronize. The
/// first report is kept.
struct KernelStatus {
  enum Code : int {
    ok = 0,
    token_outside_vocabulary = 1,
    position_outside_table = 2,
    target_outside_vocabulary = 3,
    documents_in_cudnn = 4,
    index_score_not_a_number = 5  // value: a place_number
  };
  int code;
  int value;
};

cudaStream_t stream(Context& ctx);
KernelStatus* kernel_status(Context& ctx);
/// A number for a part of the model, by which a kernel's report names it.
int place_number(Context& ctx, const char* name);
/// 80, 90, ...: compute capability times ten. 90 in emulation unless SLUICE_EMULATED_ARCH says otherwise.
int compute_capability(Context& ctx);
int num_multiprocessors(Context& ctx);

/// Error(internal) "cudaLaunchKernel(rope_forward): cudaErrorInvalidValue: invalid argument".
void check(cudaError_t error, const char* call, const char* what = "");

/// Entry points of CUDA ops refuse f64: "rope_forward: f64 runs on the CPU only".
void check_storage(const char* op, const Tensor& t);

struct LaunchConfig {
  dim3 grid, block;
  size_t smem = 0;  // dynamic shared memory, bytes
  dim3 cluster = {1, 1, 1};
};

/// A kernel whose dynamic and static shared memory together exceed 48 KiB must ask for it. Static memory is
/// not known here, and takes at most a few KiB beside dynamic memory, so a launch asks from less on.
constexpr size_t kSharedUnasked = 32 * 1024;

template <class... P, class... A>
void launch(Context& ctx, const char* name, const LaunchConfig& config, void (*kernel)(P...), A&&... args) {
#ifdef SLUICE_EMULATION
  ::emu::LaunchParams params;
  params.grid = config.grid, params.block = config.block, params.cluster = config.cluster;
  params.dyn_smem = config.smem;
  params.asks_for_smem = config.smem > kSharedUnasked;
  params.name = name;
  params.stream = stream(ctx);
  ::emu::launch(params, kernel, static_cast<P>(args)...);
#else
  if (config.smem > kSharedUnasked)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(config.smem)),
          "cudaFuncSetAttribute", name);
  cudaLaunchConfig_t lc = {};
  cudaLaunchAttribute attribute[1];
  lc.gridDim = config.grid, lc.blockDim = config.block, lc.dynamicSmemBytes = config.smem,
  lc.stream = stream(ctx);
  lc.attrs = attribute;
  if (config.cluster.x * config.cluster.y * config.cluster.z > 1) {
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = config.cluster.x;
    attribute[0].val.clusterDim.y = config.cluster.y;
    attribute[0].val.clusterDim.z = config.cluster.z;
    lc.numAttrs = 1;
  }
  check(cudaLaunchKernelEx(&lc, kernel, static_cast<P>(args)...), "cudaLaunchKernelEx", name);
#endif
}

/// Records an error from any thread of a kernel; the first report is kept.
DEVICE_INLINE void report(KernelStatus* status, KernelStatus::Code code, int value) {
  if (atomicCAS(&status->code, 0, static_cast<int>(code)) == 0) status->value = value;
}

inline unsigned blocks_for(int64_t n, int64_t per_block) {
  return static_cast<unsigned>((n + per_block - 1) / per_block);
}

/// Calls f with a null pointer of the storage type: dispatch_storage(x, [&](auto* p) { using T = ...; }).
template <class F>
void dispatch_storage(const char* op, const Tensor& t, F&& f) {
  check_storage(op, t);
  if (t.dtype == DType::f32)
    f(static_cast<float*>(nullptr));
  else
    f(static_cast<nv_bf16*>(nullptr));
}

template <class T>
T* device_data(const Tensor& t) {
  return static_cast<T*>(t.data);
}

}  // namespace sluice::cuda
