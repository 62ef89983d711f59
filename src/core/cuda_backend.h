#pragma once
// What core asks of the CUDA backend (cuda/device.cu), by the linker alone. Only in builds with
// SLUICE_HAS_CUDA.
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/device.h"

namespace sluice::cuda {

/// Empty without a driver or a card.
std::vector<DeviceInfo> devices();

void choose(int index);

/// Zeroed memory on the current device; nullptr when there is not enough.
void* allocate(int64_t bytes);
void release(void* p) noexcept;
/// Zeroed host memory that the device can copy from and to without a stop; nullptr when there is not enough.
void* allocate_pinned(int64_t bytes);
void release_pinned(void* p) noexcept;

/// Copies between host and device or within the device, in order with the ops of ctx. Host memory that is not
/// pinned makes the call wait.
void copy(Context& ctx, void* dst, const void* src, int64_t bytes);
/// Through pinned buffers, waiting.
void read(Context& ctx, void* host, const void* device, int64_t bytes);
void write(Context& ctx, void* device, const void* host, int64_t bytes);
/// On the copy stream; src is pinned.
void prefetch(Context& ctx, void* dst, const void* src, int64_t bytes);
void await_prefetch(Context& ctx);
std::unique_ptr<Mark::Impl> make_mark();
std::unique_ptr<Graph::Impl> record(Context& ctx, const std::function<void()>& ops);
/// Waits for everything enqueued on ctx, then throws what kernels reported: Error(data) for tokens, targets
/// and positions outside their tables, Error(internal) with the CUDA error's name for the rest.
void synchronize(Context& ctx);

/// An op's NVTX range, and its two events when the context carries a Profile.
class OpScope {
 public:
  OpScope(Context& ctx, const char* op);
  ~OpScope();
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;

 private:
  Context& ctx_;
};

}  // namespace sluice::cuda
