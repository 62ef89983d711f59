#include "eval/forward_memory.h"

#include <algorithm>

namespace sluice {

ForwardMemory::ForwardMemory(const TrainedModel& trained, int64_t num_tokens) {
  Context dry(0, trained.device());
  Arena measure("activations", 0, trained.device()), measure_host("host");
  ForwardBuffers shapes = make_forward_buffers(trained, measure, measure_host, num_tokens, Recompute::block);
  trained.model().forward(dry, shapes.batch, shapes.saved);
  trained.model().loss_forward(dry, shapes.losses, shapes.batch, shapes.saved);
  activations_ = std::make_unique<Arena>("activations", measure.high_water(), trained.device());
  host_ = std::make_unique<Arena>("host", measure_host.high_water());
  ctx_ = std::make_unique<Context>(std::max<int64_t>(dry.scratch.high_water(), 64), trained.device());
  buffers_ = make_forward_buffers(trained, *activations_, *host_, num_tokens, Recompute::block);
}

}  // namespace sluice
