#pragma once
// The loss of a step over all micro-batches and ranks.
#include "comm/mesh.h"
#include "core/arena.h"
#include "core/context.h"
#include "train/step_plan.h"

namespace sluice {

/// Losses of micro-batches add up on the device as they are computed. Where several ranks have some, or their
/// order must not depend on the layout (StepPlan::sums_losses_in_order), each is set aside, and all are added
/// one after the other on every rank.
class LossSum {
 public:
  /// Both outlive it.
  LossSum(const StepPlan& plan, const Mesh& mesh) : plan_(plan), ranks_(plan.summed(mesh)) {}
  void allocate(Arena& host_memory);

  /// sum (1) f64 on the device holds the loss of this rank's i-th micro-batch, added to what it held before:
  /// after it was computed.
  void end_micro_batch(Context& ctx, int64_t i, const Tensor& sum);
  /// Collective. sum = that of all micro-batches of all ranks.
  void finish(Context& ctx, const Tensor& sum);

 private:
  /// Each micro-batch of this rank contributes a loss of its own; otherwise the rank contributes one.
  bool sets_aside() const { return plan_.losses_per_rank() == plan_.micro_batches(); }

  const StepPlan& plan_;
  Communicator& ranks_;
  Tensor losses_;  // (ranks x losses per rank) f64, host; empty where the device's sum is all there is
};

}  // namespace sluice
