#pragma once
// The gradient of a step: summed over its micro-batches and ranks in a deterministic order
// (src/comm/README.md), while backward goes on.
#include <algorithm>
#include <array>
#include <vector>

#include "comm/mesh.h"
#include "comm/queue.h"
#include "config/config.h"
#include "core/arena.h"
#include "core/context.h"
#include "optim/bf16_wire.h"
#include "params/param_store.h"

namespace sluice {

/// Sums gradients over the micro-batches of a step and over the ranks, bucket by bucket as backward finishes
/// units: a reduce-scatter, after which each rank has the sum of its pieces (ParamStore::pieces), or, with
/// zero_stage 0, an all-reduce. With zero_stage 2 and 3 the gradients of two blocks at a time are all that is
/// kept beside the pieces, and every micro-batch is reduced.
///
/// gradient_dtype bf16: messages are rounded (optim/bf16_wire.h), sums are not.
///
/// With determinism same_layout, gradient accumulation is in place, and ranks are summed by the tree of
/// core/tree_sum.h: bits depend on the number of ranks and the stage. With exact they do not: every
/// micro-batch's gradient is computed from zero, and those of a step are summed
///   tree     along the perfect binary tree over the micro-batches' numbers. Bits agree for all numbers of
///            ranks that leave each rank a power of two of micro-batches. Keeps log2(micro-batches of a rank)
///            more gradients, whatever the stage.
///   fixed64  as 64-bit fixed-point numbers (last bit 2^-50), whose sum does not depend on the order; for any
///            number of ranks. An element of a micro-batch's gradient that is not below
///            2^12 / (micro-batches of the step) makes the sum NaN.
/// Ranks that share sequences then have the same gradient of a micro-batch (params/token_rows.h), of which
/// the first of them counts.
class GradSync : public UnitUser {
 public:
  /// queue: nullptr for one rank on a CPU. moves: the same mesh for tensors on the store's device
  /// (comm/device.h); on a CPU, mesh itself.
  GradSync(const ParallelConfig& config, ParamStore& store, const Mesh& mesh, const Mesh& moves,
           CommQueue* queue);

  /// Allocates workspace for this rank's `micro_batches`. Called after the store's allocation.
  void allocate(Arena& arena, int64_t micro_batches);

  /// step: determines the random bits of stochastic rounding.
  void begin_step(Context& ctx, int64_t step);
  void begin_micro_batch(Context& ctx, int64_t i);
  void begin(Context& ctx, int unit, Pass pass) override;
  void end(Context& ctx, int unit, Pass pass) override;
  void end_micro_batch(Context& ctx);
  /// The sums are in grads().
  void finish(Context& ctx);

  const std::vector<ParamStore::Piece>& pieces() const { return pieces_; }
  /// The summed gradient of pieces()[i].
  Tensor grads(size_t i) const;
  /// squares (1) f64 = the sum of the squares of the whole gradient: the same bits on every rank of every
  /// layout.
  void sum_squares(Context& ctx, Tensor squares) const;

 private:
  /// Sums of a bucket that are kept between micro-batches: `rows` sums of `length` elements, one for each
  /// source that is summed in a deterministic order.
  struct Kept {
    int rows = 1;
    int64_t length = 0, at = 0, fixed_at = 0;
  };

  bool exact() const { return config_.determinism == Determinism::exact; }
  bool fixed() const { return exact() && config_.exact_sum == ExactSum::fixed64; }
  bool tree() const { return exact() && !fixed(); }
  bool sharded() const { return config_.zero_stage >= 2; }
  bool alone() const { return mesh_.tokens().size() == 1; }
  bool last() const { return micro_batch_ + 1 == micro_batches_; }
  /// Micro-batches accumulate where the layers write their gradients.
  bool in_place() const {
    return !sharded() && (!exact() || (tree() && micro_batches_ == 1 && store_.grad_sources() == 1));
  }
  /// Whether gradients in place begin at zero unit by unit: on a GPU all do at once, since a graph of the
  /// first micro-batch serves the others too.
  static bool by_unit(const Context& ctx) { return ctx.device == Device::cpu; }
  Communicator& ranks_of(const Bucket& b) const {
    return b.split == SplitAxis::expert ? moves_.expert_data() : moves_.tokens();
  }
  int ranks_sharing(const Bucket& b) const {
    return (b.split == SplitAxis::expert ? mesh_.expert_data() : mesh_.tokens()).size();
  }
  int sources_of(const Bucket& b) const { return b.split == SplitAxis::expert ? store_.grad_sources() : 1; }
  /// So many neighbours on the axis of tokens have the same gradients.
  int equal_ranks() const { return exact() ? mesh_.context().size() : 1; }
  /// Every so-manieth source of a bucket counts, and every so-manieth of the ranks that share it.
  int source_step(const Bucket& b) const { return std::min(equal_ranks(), sources_of(b)); }
  int rank_step(const Bucket& b) const { return equal_ranks() / source_step(b); }
  int counted_sources(const Bucket& b) const { return sources_of(b) / source_step(b); }
  int counted_ranks(const Bucket& b) const { return ranks_sharing(b) / rank_step(b); }
  CommQueue::Ticket& busy(int unit) { return slot_busy_[static_cast<size_t>(ParamStore::slot_of(unit))]; }
  void sum_unit(Context& ctx, int unit);
  void sum_here(Context& ctx, size_t i, const std::vector<Tensor>& sources);
  void sum_with_ranks(Context& ctx, size_t i, const Tensor& whole);
  Tensor exchange(Context& ctx, const ParamStore::Piece& p, const Tensor& received, const Tensor& all,
                  int64_t micro_batch);
  Tensor counted_rows(Context& ctx, const Bucket& b, const Tensor& received) const;
  void gather(Context& ctx, const ParamStore::Piece& p, const Tensor& whole, const Tensor& mine);
  Bf16Wire::Place place(const Bucket& b, int64_t micro_batch) const;
  void send_shards(Context& ctx, size_t i, const std::vector<Tensor>& sources, int64_t micro_batch);
  void merge(Context& ctx, const Kept& kept, int row, const Tensor& sum, int64_t micro_batch);
  Tensor fixed_sums(size_t i) const;
  void add_to_fixed(Context& ctx, size_t i, const Tensor& x, int64_t first, Into into);

  ParallelConfig config_;
  ParamStore& store_;
  const Mesh &mesh_, &moves_;
  CommQueue* queue_;
  std::vector<ParamStore::Piece> pieces_;
  std::vector<Kept> kept_;      // per bucket
  std::vector<Mark> computed_;  // per bucket: its gradients have been computed
  std::vector<Tensor>
      levels_;       // tree: level k holds sums of 2^k micro-batches where bit k of their number is set
  Tensor fixed_;     // (elements, 2) i32: ops/fixed_sum.h
  Tensor bad_;       // (1, 2) i32: first flat position that fixed-point numbers cannot hold
  Tensor received_;  // of the other ranks; the queue's
  Bf16Wire wire_;    // with gradient_dtype bf16
  Tensor shards_;    // sums of the pieces, with zero_stage 2 and 3
  Tensor bins_;      // (kSquareBins) f64
  int64_t micro_batches_ = 1, micro_batch_ = 0, step_ = 0;
  int units_begun_ = 0;  // of this micro-batch
  std::array<CommQueue::Ticket, 3> slot_busy_{};
};

}  // namespace sluice
