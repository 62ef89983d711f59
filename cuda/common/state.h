#pragma once
// What the CUDA backend keeps in a Context between calls.
#include <memory>

#include "common/launch.h"
#include "core/cuda_backend.h"

namespace sluice::cuda {

struct State : BackendState {
  State();
  ~State() override;
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  cudaStream_t stream = nullptr;
  int compute_capability = 0;  // times ten
  int multiprocessors = 0;
  KernelStatus* status = nullptr;      // on the device
  KernelStatus* status_host = nullptr;  // pinned
  std::unique_ptr<BackendState> matmul;  // cuda/matmul
  std::unique_ptr<BackendState> cudnn;   // cuda/attention_cudnn
  std::unique_ptr<BackendState> profile;  // cuda/device.cu: events of the ops being profiled
};

/// Created on first use, on the current device.
State& state(Context& ctx);

}  // namespace sluice::cuda
