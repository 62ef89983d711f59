#pragma once
// Common parts of the communicators for GPU memory.
#include <cstdlib>
#include <memory>
#include <utility>

#include "comm/device.h"
#include "common/state.h"

namespace sluice::cuda {

/// A communicator for GPU memory on top of a host communicator, which it owns if both were split from others.
class OverHost : public Communicator {
 public:
  OverHost(Communicator& inner, Context& ctx) : ctx_(ctx), inner_(inner) {}
  OverHost(std::unique_ptr<Communicator> inner, Context& ctx)
      : ctx_(ctx), owned_(std::move(inner)), inner_(*owned_) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  [[noreturn]] void abort(ExitCode code) override {
    inner_.abort(code);
    std::abort();
  }

 protected:
  void do_barrier() override { inner_.barrier(); }
  bool alone() const { return inner_.size() == 1; }
  /// The operation of a single rank: a copy within its device, which is waited for.
  void copy_here(void* to, const void* from, int64_t bytes);

  Context& ctx_;
  std::unique_ptr<Communicator> owned_;
  Communicator& inner_;
};

/// Whether cuda/device/nccl.cu was compiled with NCCL.
bool built_with_nccl();
/// For ranks with one GPU each.
std::unique_ptr<Communicator> make_nccl(Communicator& inner, Context& ctx, double timeout_seconds);

/// A copy within the device, in order with the ops of ctx; does nothing if source and destination are equal.
void copy_on_device(Context& ctx, void* to, const void* from, int64_t bytes);

}  // namespace sluice::cuda
