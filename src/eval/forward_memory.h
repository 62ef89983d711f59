#pragma once
// Memory of forward passes of a trained model, outside a training.
#include "core/context.h"
#include "eval/trained_model.h"

namespace sluice {

/// Measured by a dry run, then allocated: buffers with losses over num_tokens.
class ForwardMemory {
 public:
  ForwardMemory(const TrainedModel& trained, int64_t num_tokens);
  Context& ctx() { return *ctx_; }
  ForwardBuffers& buffers() { return buffers_; }

 private:
  std::unique_ptr<Arena> activations_, host_;
  std::unique_ptr<Context> ctx_;
  ForwardBuffers buffers_;
};

}  // namespace sluice
