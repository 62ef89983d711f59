#pragma once
// The gradient of a step: of its micro-batches, and of its ranks, in one sum of known order (RELIABILITY 5).
#include <limits>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"
#include "core/arena.h"
#include "core/context.h"
#include "params/param_store.h"

namespace sluice {

/// Elements of a flat buffer that this many ranks can cut into equal parts.
int64_t padded_size(int64_t elements, int ranks);

/// Sums of gradients. With determinism same_layout, micro-batches add up where the layers write, and ranks by the tree of
/// comm/reduce.h: bits depend on the number of ranks. With exact they do not: every micro-batch's gradient is computed from
/// zero, and all of a step's are one sum,
///   tree     of the perfect binary tree over their numbers; bits agree for every number of ranks of which each has a power of
///            two of micro-batches;
///   fixed64  of 64-bit fixed-point numbers (last bit 2^-50), whose sum has no order; any number of ranks. An element of a
///            micro-batch's gradient that is not below 2^12 / (micro-batches of the step) makes the sum NaN.
class GradSync {
 public:
  GradSync(const ParallelConfig& config, ParamStore& store, Communicator& ranks)
      : config_(config), store_(store), ranks_(ranks) {}

  /// Work memory for `micro_batches` of this rank's.
  void allocate(Arena& arena, int64_t micro_batches);

  void begin(Context& ctx);
  /// The store's gradients hold one more micro-batch's.
  void micro_batch_done(Context& ctx);
  /// The sum over micro-batches and ranks is in the store's gradients.
  void finish(Context& ctx);

 private:
  bool exact() const { return config_.determinism == Determinism::exact; }
  /// Micro-batches add up where the layers write.
  bool in_place() const { return !exact() || (!fixed() && micro_batches_ == 1); }
  bool fixed() const { return exact() && config_.exact_sum == ExactSum::fixed64; }
  template <class T>
  void sum_over_ranks(T* whole);
  template <class T>
  void push();

  ParallelConfig config_;
  ParamStore& store_;
  Communicator& ranks_;
  std::vector<Tensor> levels_;  // tree: level k holds the sum of 2^k micro-batches where bit k of done_ is set
  Tensor fixed_;                // (elements, 2) i32: int64 each
  Tensor received_;             // of the other ranks
  static constexpr int64_t kNoneBad = std::numeric_limits<int64_t>::max();
  int64_t micro_batches_ = 1, done_ = 0;
  int64_t bad_ = kNoneBad;  // first element that fixed-point numbers cannot hold
};

}  // namespace sluice
