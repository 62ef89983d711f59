#pragma once
// Gradients sent between ranks as bf16 by stochastic rounding (ops/elementwise.h), whose expected value is
// the f32 gradient: half the bytes of an exchange that bounds the step at a large number of ranks
// (src/comm/README.md). Sums are taken in f32 after arrival, in the order of core/tree_sum.h.
#include <cstdint>

#include "comm/communicator.h"
#include "core/context.h"

namespace sluice {

class Bf16Wire {
 public:
  /// What the random numbers of a rounding depend on: every step, micro-batch, bucket and rank has its own,
  /// and the same ones after a resume.
  struct Place {
    int64_t step = 0, micro_batch = 0, bucket_begin = 0;
    int rank = 0;
  };

  /// Buffers for messages of at most `most` elements.
  void allocate(Arena& arena, int64_t most);
  bool allocated() const { return static_cast<bool>(sent_); }

  /// received (size x n) = part rank() of every rank's all (size x n), rounded by the sender; f32.
  void all_to_all(Context& ctx, Communicator& ranks, const Tensor& received, const Tensor& all,
                  const Place& place);
  /// All-gather: all (size x n) = every rank's mine (n), rounded, this rank's too, so that all ranks end with
  /// the same bits. mine may lie in all.
  void all_gather(Context& ctx, Communicator& ranks, const Tensor& all, const Tensor& mine,
                  const Place& place);

 private:
  Tensor sent_, arrived_;  // (most) bf16
};

}  // namespace sluice
