#pragma once
// Host access to a tensor that may be on a GPU.
#include <vector>

#include "core/context.h"

namespace sluice {

/// Host memory with a tensor's values: the tensor's own memory on a CPU, a copy otherwise. For operations
/// outside the step (initial values, checkpoints, evaluation).
class HostView {
 public:
  enum class Content { read, uninitialized };

  HostView(Context& ctx, const Tensor& t, Content content = Content::read) : ctx_(ctx), device_(t), host_(t) {
    if (t.device == Device::cpu) return;
    memory_.resize(static_cast<size_t>(t.bytes()));
    host_.device = Device::cpu;
    host_.data = ctx.dry_run ? nullptr : memory_.data();
    if (content == Content::read) read_tensor(ctx, host_.data, device_);
  }
  HostView(const HostView&) = delete;
  HostView& operator=(const HostView&) = delete;

  const Tensor& tensor() const { return host_; }
  /// Copies the host memory to the tensor and waits.
  void write_back() {
    if (device_.device != Device::cpu) write_tensor(ctx_, device_, host_.data);
  }

 private:
  Context& ctx_;
  Tensor device_, host_;
  std::vector<char> memory_;
};

}  // namespace sluice
