#pragma once
// How the ranks of a training reach each other: on their mesh, beside the computation, for memory of the host
// and of their GPUs.
#include <memory>
#include <string>

#include "comm/device.h"
#include "comm/mesh.h"
#include "comm/queue.h"
#include "config/config.h"
#include "core/context.h"

namespace sluice {

/// Of parallel.*. Error(usage) names an axis that this version does not train on.
MeshShape mesh_shape(const ParallelConfig& parallel);

class Communication {
 public:
  /// Collective. ranks: nullptr for one rank alone; they outlive this. dry_run: nothing is moved, so no
  /// communicator of GPUs is made. Error(usage) where the ranks cannot form the configured mesh.
  Communication(const ParallelConfig& config, Communicator* ranks, Device device, bool dry_run);

  /// All ranks, in turn with what a step leaves under way.
  Communicator& world() const { return *world_; }
  /// For memory of the host.
  const Mesh& mesh() const { return mesh_; }
  /// The same ranks for memory of the device: on a CPU, mesh() itself.
  const Mesh& device_mesh() const { return device_ ? *device_->mesh : mesh_; }
  /// The ranks of an axis, more than one, for memory of their GPUs in turn with the ops of ctx, as tokens
  /// need it that go to experts on other GPUs; nullptr on CPUs and where the axis has one rank. ctx outlives
  /// it.
  std::unique_ptr<Communicator> of_gpus(MeshAxis axis, Context& ctx);
  /// The thread beside the computation; nullptr where nothing is ever under way.
  CommQueue* queue() const { return queue_.get(); }
  /// What is under way is done, and nothing more.
  void finish();

  /// Why communication has no thread of its own; empty where it has one, or needs none.
  std::string queue_problem() const;
  /// Nanoseconds spent waiting for other ranks.
  int64_t waited_ns() const { return queue_ ? queue_->waited_ns() : 0; }
  /// How gradients and weights travel between GPUs; empty where there are none.
  std::string transport() const;

 private:
  /// The ranks once more, for memory of their GPUs; used by the queue's thread.
  struct DeviceRanks {
    DeviceRanks(Communicator& host, CommQueue& queue, const ParallelConfig& config);
    std::unique_ptr<Communicator> world;
    std::unique_ptr<Mesh> mesh;
  };

  std::unique_ptr<CommQueue> queue_;
  std::unique_ptr<Communicator> world_;
  Mesh mesh_;
  std::unique_ptr<DeviceRanks> device_;
};

}  // namespace sluice
