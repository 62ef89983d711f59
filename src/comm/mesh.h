#pragma once
// The ranks of a training on the axes of its parallelism: which ranks share what, and a communicator for each
// axis.
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace sluice {

/// Ranks per axis. What is left of the world is the data axis; the expert axis is a part of data and context.
struct MeshShape {
  int tensor = 1, context = 1, expert = 1, pipeline = 1;
};

enum class MeshAxis : uint8_t {
  world,   // all ranks of the training: agreement, barriers, checkpoints, abort
  data,    // compute different samples of the global batch
  tokens,  // data x context: compute different tokens of the global batch. Losses and gradients are summed
           // over them, and ZeRO shards over them
  expert,  // hold different experts of one copy of the model, and different tokens
  expert_data,  // hold the same experts, and different tokens: gradients of experts are summed over them
  tensor,       // hold different parts of every matrix
  context,      // hold different parts of every sequence
  pipeline      // hold different layers
};
constexpr int kMeshAxes = 8;

/// Which ranks belong together on each axis, as arithmetic on their numbers. Ranks are numbered tensor
/// fastest, then context, then data, then pipeline:
///   rank = tensor + T (tokens + N pipeline),   tokens = context + C data = expert + E expert_data.
/// Ranks that talk most (tensor) are neighbours and so on one machine.
class MeshLayout {
 public:
  /// Error(usage) where the number of ranks is not a multiple of tensor x context x pipeline x expert.
  MeshLayout(int ranks, const MeshShape& shape);

  int ranks() const { return ranks_; }
  const MeshShape& shape() const { return shape_; }
  /// The ranks of an axis are `size` numbers that differ by multiples of `stride` (Communicator::axis).
  struct Span {
    int stride = 1, size = 1;
  };
  Span span(MeshAxis axis) const;
  /// The coordinate of a rank on an axis.
  int coordinate(MeshAxis axis, int rank) const;
  /// The ranks that differ from this one on that axis alone, itself among them, by coordinate.
  std::vector<int> group(MeshAxis axis, int rank) const;

 private:
  int ranks_;
  MeshShape shape_;
};

/// A rank's communicator for each axis.
class Mesh {
 public:
  /// Collective. The world outlives the mesh.
  Mesh(Communicator& world, const MeshShape& shape);

  const MeshLayout& layout() const { return layout_; }
  Communicator& on(MeshAxis axis) const { return *axes_[static_cast<size_t>(axis)]; }

  Communicator& world() const { return on(MeshAxis::world); }
  Communicator& data() const { return on(MeshAxis::data); }
  Communicator& tokens() const { return on(MeshAxis::tokens); }
  /// expert().rank() holds experts [rank E / size, (rank + 1) E / size).
  Communicator& expert() const { return on(MeshAxis::expert); }
  Communicator& expert_data() const { return on(MeshAxis::expert_data); }
  Communicator& tensor() const { return on(MeshAxis::tensor); }
  Communicator& context() const { return on(MeshAxis::context); }
  Communicator& pipeline() const { return on(MeshAxis::pipeline); }

 private:
  MeshLayout layout_;
  /// Made of the world: an axis of all ranks is the world itself, and axes of one rank share one communicator
  /// (of the world's kind, since a GPU's memory may be moved by it).
  std::vector<std::unique_ptr<Communicator>> parts_;
  std::array<Communicator*, kMeshAxes> axes_{};
};

}  // namespace sluice
