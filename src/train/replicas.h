#pragma once
// Detection of bits corrupted by the memory or processor of one rank: what its optimizer reads must be what
// it wrote, and tensors that several ranks hold must be equal.
#include <cstdint>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "core/arena.h"
#include "core/context.h"

namespace sluice {

/// A tensor replicated on every rank of a group: the ranks of the data axis, or those with the same experts.
struct Replica {
  std::string name;
  Tensor tensor;
  bool of_expert = false;
};

/// Hashes replicas in place (by XXH3; on a GPU by ops/bit_sum.h) and compares the hashes of all ranks.
class ReplicaCheck {
 public:
  /// With every_steps = 0 it does nothing; nor on a single rank, unless `alone`: its optimizer watches its
  /// own bits.
  ReplicaCheck(int64_t every_steps, const Mesh& mesh, bool alone);

  /// The tensors stay where they are. device, host: for the hashes of a GPU; the host's is pinned.
  void allocate(std::vector<Replica> replicas, Arena& device, Arena& host, bool on_gpu);
  const std::vector<Replica>& replicas() const { return replicas_; }

  bool active() const { return every_steps_ > 0; }
  /// True before the first step and every every_steps steps after it.
  bool due(int64_t step) const {
    return active() && step != equal_step_ && (equal_step_ < 0 || step % every_steps_ == 0);
  }
  /// Collective. `changed`: what this rank found changed in its own memory, in words; empty: nothing. If any
  /// rank has found something, all throw the same Error(corruption), which says what. `state`: further state
  /// that must be equal on all ranks. If ranks differ, all throw the same Error(corruption), which names the
  /// step, the tensors and the deviating ranks, by majority if there is one.
  void compare(Context& ctx, Communicator& ranks, int64_t step, const std::string& state,
               const std::string& changed);
  /// Steps done when replicas were last found equal; -1: never.
  int64_t equal_step() const { return equal_step_; }

 private:
  [[noreturn]] void tell_change(Communicator& ranks, int64_t step, const std::string& changed,
                                const std::vector<int>& finders);
  [[noreturn]] void tell_difference(Communicator& ranks, int64_t step, const std::vector<int>& expert_ranks);
  bool of_expert(size_t i) const { return i < replicas_.size() && replicas_[i].of_expert; }

  std::string when(int64_t step) const;

  int64_t every_steps_;
  const Mesh& mesh_;
  std::vector<Replica> replicas_;
  Tensor sums_, host_sums_;       // (replicas, 2) i32, with a GPU
  std::vector<uint64_t> hashes_;  // of the last comparison; the last one is that of the state
  int64_t equal_step_ = -1;
};

/// The ranks with wrong bits, given the hash of each: all except those with the majority hash, or all if
/// there is no majority. Empty if all hashes are equal.
std::vector<int> ranks_in_doubt(const std::vector<int>& ranks, const std::vector<uint64_t>& hashes);

}  // namespace sluice
