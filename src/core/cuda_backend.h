#pragma once
// The functions of the CUDA backend (cuda/device/device.cu) that core calls, resolved by the linker. Only in
// builds with SLUICE_HAS_CUDA.
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/device.h"

namespace sluice::cuda {

/// Empty without a driver or a GPU. Makes no context on any of them: before choose() that would be device 0,
/// for every rank of the machine.
std::vector<DeviceInfo> devices();

void choose(int index);

/// Zeroed memory on the current device; nullptr if there is not enough.
void* allocate(int64_t bytes);
void release(void* p) noexcept;
/// Zeroed pinned host memory; nullptr if there is not enough.
void* allocate_pinned(int64_t bytes);
void release_pinned(void* p) noexcept;

/// Copies between host and device or within the device, in order with the ops of ctx. With host memory that
/// is not pinned, the call waits.
void copy(Context& ctx, void* dst, const void* src, int64_t bytes);
/// Copies through pinned buffers and waits.
void read(Context& ctx, void* host, const void* device, int64_t bytes);
void write(Context& ctx, void* device, const void* host, int64_t bytes);
/// Copies on the copy stream; src is pinned.
void prefetch(Context& ctx, void* dst, const void* src, int64_t bytes);
void await_prefetch(Context& ctx);
std::unique_ptr<Mark::Impl> make_mark();
std::unique_ptr<Graph::Impl> record(Context& ctx, const std::function<void()>& ops);
/// Waits for everything enqueued on ctx, then throws the errors that kernels reported: Error(data) for
/// tokens, targets and positions out of range, Error(numeric) for index scores that are not numbers,
/// Error(internal) with the name of the CUDA error otherwise.
void synchronize(Context& ctx);

/// The NVTX range of an op, and its two events if the context has a Profile.
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
