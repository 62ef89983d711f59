#pragma once
// The memory of a training, known before it is taken.
#include <cstdint>
#include <set>

#include "core/arena.h"
#include "ops/product_algorithms.h"

namespace sluice {

/// Bytes of each arena, and what else a dry run tells.
struct MemoryPlan {
  int64_t parameters = 0, gradients = 0, optimizer = 0, activations = 0, batch = 0, scratch = 0;
  int64_t snapshot = 0;    // the copy that checkpoints are written from
  int64_t pinned = 0;      // host memory beside a GPU
  int64_t checkpoint = 0;  // on disk: one checkpoint, of all ranks together
  bool on_gpu = false;     // then the total is the device's: the snapshot is the host's
  std::set<GpuProduct> products;  // of a step on a GPU
  int64_t total() const {
    return parameters + gradients + optimizer + activations + batch + scratch + (on_gpu ? 0 : snapshot);
  }
};

/// All arenas of a trainer but its scratch, which is its context's.
struct TrainerMemory {
  TrainerMemory(const MemoryPlan& plan, Device device)
      : parameters("parameters", plan.parameters, device),
        gradients("gradients", plan.gradients, device),
        optimizer("optimizer", plan.optimizer, device),
        activations("activations", plan.activations, device),
        batch("batch", plan.batch, device),
        pinned(Arena::pinned("pinned", plan.pinned)) {}

  /// For small things that the host reads and writes: beside a GPU, pinned memory.
  Arena& host() { return batch.device() == Device::cuda ? pinned : batch; }

  Arena parameters, gradients, optimizer, activations, batch, pinned;
};

}  // namespace sluice
