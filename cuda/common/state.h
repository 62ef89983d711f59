#pragma once
// State of the CUDA backend in a Context between calls.
#include <memory>
#include <string>
#include <vector>

#include "common/launch.h"
#include "core/cuda_backend.h"

namespace sluice::cuda {

struct State : BackendState {
  State();
  ~State() override;
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  cudaStream_t stream = nullptr;
  cudaStream_t copy_stream = nullptr;  // prefetch
  cudaEvent_t prefetched = nullptr;    // the last prefetch is complete
  // For read and write: two buffers, each with an event after which it may be reused.
  static constexpr int64_t kPinnedBytes = int64_t{16} << 20;
  char* pinned[2] = {};
  cudaEvent_t pinned_done[2] = {};
  int compute_capability = 0;  // times ten
  int multiprocessors = 0;
  KernelStatus* status = nullptr;         // on the device
  KernelStatus* status_host = nullptr;    // pinned
  std::vector<std::string> places;        // by place_number
  std::unique_ptr<BackendState> matmul;   // cuda/matmul
  std::unique_ptr<BackendState> cudnn;    // cuda/attention_cudnn
  std::unique_ptr<BackendState> profile;  // cuda/device.cu: events of the ops being profiled
};

/// Created on first use, on the current device.
State& state(Context& ctx);

}  // namespace sluice::cuda
