#pragma once
// Context parallelism (parallel.context): the ranks that share every sequence. Each computes its own tokens
// (comm/sequence_split.h) and gathers the keys and values of all of them, layer by layer, so that every row
// of scores has one softmax over all its keys on one rank: there are no partial results to merge.
#include <functional>

#include "comm/communicator.h"
#include "comm/queue.h"
#include "comm/sequence_split.h"
#include "core/context.h"
#include "nn/batch.h"
#include "params/token_rows.h"

namespace sluice {

class SequenceRanks : public TokenRows {
 public:
  /// ranks: Mesh::context, more than one of them. queue: where communication overlaps computation; nullptr:
  /// it does not. of_gpus: the same ranks for memory of their GPUs, by way of the queue; nullptr on CPUs. All
  /// outlive this.
  SequenceRanks(Communicator& ranks, int64_t seq_len, CommQueue* queue, Communicator* of_gpus = nullptr);
  /// Allocates own_key for up to `tokens` tokens of this rank.
  void allocate(Context& ctx, Arena& arena, int64_t tokens);

  const SequenceSplit& split() const { return split_; }
  /// For memory of the host.
  Communicator& ranks() const { return ranks_; }
  /// (tokens) i32: where each of this rank's tokens lies among the tokens of all ranks (ops/attention.h).
  Tensor own_key(int64_t tokens) const { return own_key_.rows(0, tokens); }
  /// The same, in t, where all ranks have `before` tokens before these (KeyValueCache).
  Tensor own_key_behind(Context& ctx, ScratchScope& t, int64_t before, int64_t tokens) const;

  /// An all-gather under way.
  struct Gather {
    Tensor whole;  // (N T, ...)
    CommQueue::Ticket ticket = 0;
  };
  /// Collective. Begins to gather rows (T, ...) of every rank into whole, in the order of the sequences; both
  /// stay as they are until finish().
  Gather begin_gather(Context& ctx, Tensor whole, const Tensor& rows) const;
  Tensor finish(Context& ctx, const Gather& gather) const;
  /// Collective. whole (N T) i32 = the first visible token of the tokens of all ranks, counted among these,
  /// from first_key (T) of this rank's (nn/batch.h). own_key: where its tokens lie among these.
  Tensor gather_first_keys(Context& ctx, Tensor whole, const Tensor& first_key, const Tensor& own_key) const;
  Tensor room(ScratchScope& t, const Tensor& rows) const override;
  Tensor whole(Context& ctx, ScratchScope& t, const Tensor& rows) const override;
  void take_own(Context& ctx, Tensor rows, const Tensor& whole) const override;
  /// The same of numbers by head, (H, T) on every rank: (H, N T). On a CPU only.
  Tensor whole_heads(Context& ctx, ScratchScope& t, const Tensor& heads) const;
  /// The same of a batch, whose first_key counts among its own tokens then.
  Batch whole_batch(Context& ctx, ScratchScope& t, const Batch& batch) const;
  /// A reduce-scatter under way.
  struct Scatter {
    Tensor received;  // (N T, ...)
    CommQueue::Ticket ticket = 0;
  };
  /// Collective. Begins to send the rows of whole (N T, ...), in the order of the sequences, to the ranks of
  /// their tokens; received (N T, ...) gets what the others send. Both stay as they are until
  /// finish(), and whole is used up.
  Scatter begin_scatter(Context& ctx, Tensor received, const Tensor& whole) const;
  /// rows (T, ...) = the sum over the ranks, in their order, of their gradients of this rank's tokens.
  void finish(Context& ctx, Tensor rows, const Scatter& scatter) const;
  /// Both.
  void reduce_scatter(Context& ctx, Tensor rows, const Tensor& whole) const;

 private:
  CommQueue::Ticket post(Context& ctx, std::function<void()> work) const;
  void reverse_tail(Context& ctx, const Tensor& tail) const;
  void sum(Context& ctx, Tensor rows, const Tensor& received) const;

  Communicator &ranks_, &of_device_;
  CommQueue* queue_;
  SequenceSplit split_;
  Tensor own_key_;
};

/// Sample i of `part` = this rank's tokens of one whole sample, whose first_key counts from the sample's
/// start. first_key of the part is as far before each of its tokens, and below 0 where another rank has that
/// token. Host memory.
void take_part(const SequenceSplit& split, const Batch& part, int64_t i, const Batch& whole);

}  // namespace sluice
