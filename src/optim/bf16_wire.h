#pragma once
// Gradients that travel between ranks in two bytes: rounded to bf16, up or down at random so that the mean of what arrives is
// what was sent (stochastic rounding; PERFORMANCE 5c: at a large number of ranks their exchange bounds the step). Sums are
// taken in f32 after arrival, in the order of comm/reduce.h.
#include <cstdint>

#include "comm/communicator.h"
#include "core/arena.h"

namespace sluice {

/// to[i] = x[i] rounded to a neighbouring bf16: to the upper one with the probability of x[i]'s distance from the lower one over
/// theirs from each other. What is a bf16 stays, infinities and NaN stay what they are; a finite number stays finite. The random
/// bits are a function of (key, i).
void round_stochastically(bf16* to, const float* x, int64_t n, uint32_t key);

class Bf16Wire {
 public:
  /// Whose bits: every step, micro-batch, bucket and rank rounds by random numbers of its own, the same ones again after a resume.
  struct Place {
    int64_t step = 0, micro_batch = 0, bucket_begin = 0;
    int rank = 0;
  };

  /// For `most` elements at once.
  void allocate(Arena& arena, int64_t most);
  bool allocated() const { return static_cast<bool>(sent_); }

  /// received (size x n) = part rank() of every rank's all (size x n), each rounded where it came from.
  void all_to_all(Communicator& ranks, float* received, const float* all, int64_t n, const Place& place);
  /// all (size x n) = every rank's mine (n), rounded, its own too: the same bits everywhere. mine may lie in all.
  void all_gather(Communicator& ranks, float* all, const float* mine, int64_t n, const Place& place);

 private:
  Tensor sent_, arrived_;  // (most) bf16
};

}  // namespace sluice
