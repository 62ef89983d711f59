#pragma once
// What the communicators of GPU memory share.
#include <memory>

#include "comm/device.h"
#include "common/state.h"

namespace sluice::cuda {

/// True where cuda/nccl.cu was compiled with NCCL.
bool built_with_nccl();
/// Over ranks that have a GPU each.
std::unique_ptr<Communicator> make_nccl(Communicator& inner, Context& ctx, double timeout_seconds);

/// A copy within the device, in order with the ops of ctx; nothing onto itself.
void copy_on_device(Context& ctx, void* to, const void* from, int64_t bytes);

}  // namespace sluice::cuda
