#pragma once
// Where a rank stands among all: its place on each axis along which work is shared, and the communicator of
// every axis.
#include <memory>

#include "comm/communicator.h"

namespace sluice {

/// Ranks per axis that share one model; what is left of the world is the data axis, whose ranks share the
/// global batch.
struct MeshShape {
  int tensor = 1, context = 1, expert = 1, pipeline = 1;
};

/// Ranks are numbered tensor fastest, then context, then pipeline, then data. The expert axis lies within
/// data: `expert` ranks that follow each other compute different micro-batches and hold different experts, so
/// that a token may have to travel; everything but experts is the same on all ranks of the data axis.
class Mesh {
 public:
  /// Collective. The world outlives the mesh. Error(usage) where the world cannot be cut so; tensor, context
  /// and pipeline above 1 are refused by name in this version.
  Mesh(Communicator& world, const MeshShape& shape);

  const MeshShape& shape() const { return shape_; }
  Communicator& world() const { return world_; }
  /// All ranks that share a global batch.
  Communicator& data() const { return world_; }
  /// Ranks that share the experts of one copy: expert().rank() holds experts [rank E / size, (rank + 1) E /
  /// size).
  Communicator& expert() const { return *expert_; }
  /// Ranks that hold the same experts, ordered like the data axis.
  Communicator& expert_data() const { return *expert_data_; }

 private:
  MeshShape shape_;
  Communicator& world_;
  std::unique_ptr<Communicator> expert_, expert_data_;
};

}  // namespace sluice
