#pragma once
// Comparison of what several ranks hold in full: a bit that changed in the memory or by the processor of one
// rank is found.
#include <cstdint>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "core/arena.h"
#include "core/context.h"

namespace sluice {

/// A tensor of which every rank of a group holds all: the ranks of the data axis, or those that hold the same
/// experts.
struct Replica {
  std::string name;
  Tensor tensor;
  bool of_expert = false;
};

/// Hashes replicas (ops/bit_sum.h) where they lie, and compares the hashes of all ranks.
class ReplicaCheck {
 public:
  /// every_steps = 0, or one rank: there is nothing to do.
  ReplicaCheck(int64_t every_steps, const Mesh& mesh);

  /// The tensors stay where they are. device, host: for the hashes; the host's is pinned beside a GPU.
  void allocate(std::vector<Replica> replicas, Arena& device, Arena& host, bool on_gpu);
  const std::vector<Replica>& replicas() const { return replicas_; }

  bool active() const { return every_steps_ > 0; }
  /// Before the first step, and every so many steps from then on.
  bool due(int64_t step) const {
    return active() && step != equal_step_ && (equal_step_ < 0 || step % every_steps_ == 0);
  }
  /// Collective. `state`: what else must be the same on all ranks. Where ranks differ, all throw the same
  /// Error(corruption): it names step, tensors and ranks, by majority where there is one.
  void compare(Context& ctx, Communicator& ranks, int64_t step, const std::string& state);
  /// Steps done when replicas were last found equal; -1: never.
  int64_t equal_step() const { return equal_step_; }

 private:
  [[noreturn]] void tell_difference(Communicator& ranks, int64_t step, const std::vector<int>& expert_ranks);
  bool of_expert(size_t i) const { return i < replicas_.size() && replicas_[i].of_expert; }

  int64_t every_steps_;
  const Mesh& mesh_;
  std::vector<Replica> replicas_;
  Tensor sums_, host_sums_;       // (replicas, 2) i32
  std::vector<uint64_t> hashes_;  // of the last comparison, that of the state last
  int64_t equal_step_ = -1;
};

/// Which of the ranks hold the wrong bits, by the hash of each: all but those of a hash that more than half
/// have; all where there is none. Empty where they are equal.
std::vector<int> ranks_in_doubt(const std::vector<int>& ranks, const std::vector<uint64_t>& hashes);

}  // namespace sluice
