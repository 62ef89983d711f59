#pragma once
// Gradients that travel between ranks in two bytes: rounded to bf16, up or down at random so that the mean of
// what arrives is what was sent (ops/elementwise.h; src/comm/README.md: at a large number of ranks their
// exchange bounds the step). Sums are taken in f32 after arrival, in the order of core/tree_sum.h.
#include <cstdint>

#include "comm/communicator.h"
#include "core/context.h"

namespace sluice {

class Bf16Wire {
 public:
  /// Whose bits: every step, micro-batch, bucket and rank rounds by random numbers of its own, the same ones
  /// again after a resume.
  struct Place {
    int64_t step = 0, micro_batch = 0, bucket_begin = 0;
    int rank = 0;
  };

  /// For `most` elements at once.
  void allocate(Arena& arena, int64_t most);
  bool allocated() const { return static_cast<bool>(sent_); }

  /// received (size x n) = part rank() of every rank's all (size x n), each rounded where it came from; f32.
  void all_to_all(Context& ctx, Communicator& ranks, const Tensor& received, const Tensor& all,
                  const Place& place);
  /// all (size x n) = every rank's mine (n), rounded, its own too: the same bits everywhere. mine may lie in
  /// all.
  void all_gather(Context& ctx, Communicator& ranks, const Tensor& all, const Tensor& mine,
                  const Place& place);

 private:
  Tensor sent_, arrived_;  // (most) bf16
};

}  // namespace sluice
