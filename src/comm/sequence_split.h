#pragma once
// How several ranks share a sequence (context parallelism). A sequence is cut into 2 N equal chunks, and rank
// r has the chunks r and 2 N - 1 - r: head and tail together see as many keys under a causal mask on every
// rank. Only positions, no memory.
#include <cstdint>

namespace sluice {

struct SequenceSplit {
  int64_t ranks = 1, rank = 0, seq_len = 0;  // 2 ranks divides seq_len, where there are several

  int64_t chunk() const { return seq_len / (2 * ranks); }
  /// Tokens of a sequence on each rank; several sequences follow each other.
  int64_t length() const { return seq_len / ranks; }
  /// The place in its sequence of the first token of a rank's chunk: half 0 is the head, half 1 the tail.
  int64_t begin(int64_t of_rank, int64_t half) const {
    return (half == 0 ? of_rank : 2 * ranks - 1 - of_rank) * chunk();
  }
  /// Of this rank's token i among the tokens of its sequence, i < length().
  int64_t place(int64_t i) const { return begin(rank, i / chunk()) + i % chunk(); }
  /// The number among the tokens of all ranks of this rank's token t, of whichever sequence.
  int64_t token_of(int64_t t) const { return t / length() * seq_len + place(t % length()); }
  /// The rank that has the token at a place of its sequence, and which of that rank's tokens it is.
  int64_t rank_of(int64_t place) const {
    return place < seq_len / 2 ? place / chunk() : 2 * ranks - 1 - place / chunk();
  }
  int64_t index_of(int64_t place) const { return (place < seq_len / 2 ? 0 : chunk()) + place % chunk(); }
};

}  // namespace sluice
