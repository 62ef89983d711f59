#pragma once
// How the steps of a training are carried out on this rank: everything that follows from its configuration,
// its mesh and its device alone.
#include <cstdint>

#include "comm/mesh.h"
#include "config/config.h"
#include "core/device.h"
#include "params/param_store.h"

namespace sluice {

/// Made once, before anything is allocated; the trainer asks it and keeps no flags of its own.
class StepPlan {
 public:
  /// dry_run: the step is measured, not computed. Error(usage) where the ranks cannot share the training
  /// (config/rank_rules.h).
  StepPlan(const Config& config, const Mesh& mesh, Device device, bool dry_run = false);

  bool dry_run() const { return dry_run_; }
  bool on_gpu() const { return on_gpu_; }

  // Micro-batches.

  /// Of this rank, per step.
  int64_t micro_batches() const { return micro_batches_; }
  /// Those that are computed: micro-batches are alike, so a dry run needs one.
  int64_t computed_micro_batches() const { return dry_run_ ? 1 : micro_batches_; }
  /// The number of this rank's i-th among all micro-batches of the step.
  int64_t global_micro_batch(int64_t i) const { return data_rank_ * micro_batches_ + i; }
  /// On a GPU the next step's samples are loaded while this step computes.
  bool loads_ahead() const { return on_gpu_; }

  // Ranks.

  bool several_ranks() const { return token_ranks_ > 1; }
  /// Each rank computes a part of every sequence.
  bool context_parallel() const { return token_ranks_ > data_ranks_; }
  /// Nevertheless each of them computes every sum over tokens of its micro-batches as a whole
  /// (params/token_rows.h): gradients, losses, and what the losses' states count.
  bool sums_whole_sequences() const { return exact_ && context_parallel(); }
  /// The ranks whose sums of a micro-batch together make those of the step.
  Communicator& summed(const Mesh& mesh) const {
    return sums_whole_sequences() ? mesh.data() : mesh.tokens();
  }
  /// How many ranks share what one of them sums.
  int64_t ranks_of_sum() const { return sums_whole_sequences() ? token_ranks_ / data_ranks_ : 1; }
  /// Tokens travel to experts on other ranks.
  bool expert_parallel() const { return expert_ranks_ > 1; }
  /// Whether a forward pass is collective, because weights, experts or keys are on other ranks.
  bool forward_needs_all_ranks() const { return expert_parallel() || shards_weights() || context_parallel(); }

  // What is kept in pieces, one on each rank (ZeRO, Rajbhandari et al. 2020).

  bool shards_optimizer() const { return zero_stage_ >= 1; }
  bool shards_gradients() const { return zero_stage_ >= 2; }
  bool shards_weights() const { return zero_stage_ >= 3; }
  StoreLayout store_layout() const;

  // Sums.

  /// parallel.determinism: exact. Results are bitwise independent of the number of ranks.
  bool exact() const { return exact_; }
  /// WeightSync and GradSync follow the model from unit to unit; otherwise layers add up gradients in place.
  bool follows_units() const { return several_ranks() || exact_ || shards_optimizer(); }
  /// GradSync does so: on a CPU always, since the first products of a unit's gradients overwrite them there.
  bool gradients_follow_units() const { return follows_units() || !on_gpu_; }
  /// The step's loss is summed from the losses of its micro-batches, in their order.
  bool sums_losses_in_order() const { return several_ranks() || exact_; }
  /// How many losses this rank contributes to that sum: a GPU adds up its own where their order is free.
  int64_t losses_per_rank() const { return on_gpu_ && !exact_ ? 1 : micro_batches_; }
  /// No rank alone has the whole summed gradient, or the bits of its norm must not depend on the layout.
  bool norm_needs_all_ranks() const { return shards_optimizer() || expert_parallel() || exact_; }
  /// The GPU takes the norm, judges the step and updates the weights without the host.
  bool updates_on_device_alone() const { return on_gpu_ && !norm_needs_all_ranks(); }

  // CUDA graphs.

  /// Whether computing this rank's i-th micro-batch is more than a sequence of ops that is the same for each:
  /// ranks communicate in it, or its gradients have a place of their own in the exact sum.
  bool needs_eager(int64_t i) const;

 private:
  bool dry_run_, on_gpu_, exact_;
  int64_t zero_stage_, data_rank_, data_ranks_, token_ranks_, expert_ranks_, expert_data_ranks_,
      micro_batches_;
};

}  // namespace sluice
