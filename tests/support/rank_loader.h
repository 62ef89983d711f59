#pragma once
// The samples that one rank trains on, read as a trainer reads them.
#include <cstdint>
#include <vector>

#include "comm/mesh.h"
#include "train/sample_loader.h"

namespace sluice::test {

/// A loader with all that it needs, of one rank.
struct RankLoader {
  RankLoader(const Config& config, const Blend& data, Communicator& world, const MeshShape& shape = {})
      : mesh(world, shape), plan(config, mesh, Device::cpu), samples(config, &data, plan, mesh) {
    samples.allocate(memory, memory);
  }
  /// The tokens of a loaded step, micro-batch after micro-batch.
  std::vector<int32_t> tokens(int64_t step) const {
    std::vector<int32_t> all;
    for (int64_t i = 0; i < plan.micro_batches(); ++i) {
      const Tensor t = samples.micro_batch(step, i);
      const auto* first = t.as<int32_t>();
      all.insert(all.end(), first, first + t.numel() / 4);
    }
    return all;
  }
  Arena memory{"samples", 1 << 20};
  Context ctx{64};
  Mesh mesh;
  StepPlan plan;
  SampleLoader samples;
};

}  // namespace sluice::test
