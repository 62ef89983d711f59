#pragma once
// Expert parallelism: dispatch of tokens to the ranks that hold their experts, and combine; dropless, in
// receive buffers of bounded capacity. All ranks know how many rows each rank has for each expert, so that
// all compute the same plan. The rows that a rank receives are ordered by source, then expert, then slot. A
// run is all rows of one source for one expert. Each round transfers the next runs that fit into the receive
// buffer; there are as many rounds as the fullest rank needs. Runs are never split, and runs of an expert
// come in the order of the sources, so that sums over rows (the experts' gradients) do not depend on the
// number of rounds. Rows whose expert is on the token's own rank take part in rounds, but are not copied.
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"
#include "core/context.h"
#include "ops/permute.h"

namespace sluice {

/// The expert-parallel ranks and their receive-buffer capacity.
struct ExpertRanks {
  ExpertRanks(Communicator* ranks_ = nullptr, double capacity_ = ParallelConfig().expert_capacity,
              Communicator* moves_ = nullptr)
      : ranks(ranks_), capacity(capacity_), moves(moves_ ? moves_ : ranks_) {}

  Communicator* ranks;  // Mesh::expert; null: all experts are on this rank
  double capacity;      // parallel.expert_capacity
  Communicator*
      moves;  // the same ranks, for the memory of the rows; its operations start after the ops of the step

  int size() const { return ranks ? ranks->size() : 1; }
  int rank() const { return ranks ? ranks->rank() : 0; }
  /// Receive-buffer capacity in rows per round, for T tokens per rank, K experts per token and E experts in
  /// total: at most the largest possible number, and at least the largest run.
  int64_t most_rows(int64_t tokens, int64_t experts_per_token, int64_t experts) const;
};

/// One dispatch and combine, round by round. The host computes the plan, for which a GPU waits. Every rank of
/// ExpertRanks makes the same calls. A dry run does not communicate and has two completely filled rounds.
class Dispatch {
 public:
  /// Collective. counts (ranks, E) i32 is overwritten with the number of rows of each rank for each expert.
  /// permutation.rows becomes the position of every slot's row among the results: rows sent to other ranks in
  /// the permutation's order, followed by this rank's own.
  static void plan(Context& ctx, const ExpertRanks& ranks, Tensor counts, const Permutation& permutation);

  /// counts and permutation: of this rank's T K rows, after plan(). most: ExpertRanks::most_rows. Workspace
  /// is allocated from t and, in every call, from ctx.scratch.
  Dispatch(Context& ctx, ScratchScope& t, const ExpertRanks& ranks, const Tensor& counts,
           const Permutation& permutation, int64_t most);

  /// Advances to the first or next round; false after the last one.
  bool next();
  int64_t round() const { return round_; }

  /// Rows of this round from a rank, sorted by expert: [begin, begin + count) of the received rows; this
  /// rank's own rows follow all received ones.
  struct Part {
    int64_t begin = 0, count = 0;
  };
  Part from(int source) const;
  /// (local experts + 1) i32: offsets of the experts' rows, relative to begin.
  Tensor offsets(int source) const { return offsets_.rows(source, 1).view({offsets_.dim(1)}); }
  /// This rank's own rows of this round: rows of the permutation, and their positions among the results.
  Part own() const;
  int64_t own_place() const;
  /// (most) i32: 0, 1, 2, ...
  const Tensor& row_numbers() const { return row_numbers_; }

  /// Overwrites the first rows of received (most, width) with the rows that other ranks send in this round.
  /// Row i of a sender's permutation is row index[i] of its `all` (any, width).
  void to_experts(Tensor received, const Tensor& all, const Tensor& index);
  /// Combine: computed (most, width) belongs to the received rows. The result for row i of the permutation is
  /// written to row index[i] of all (any, width), or, without an index, to its position among the results,
  /// all (T K, width).
  void from_experts(Tensor all, const Tensor& computed, const Tensor& index);

 private:
  void read_counts(const Tensor& counts, const Tensor& offsets);
  void exchange(void* received, std::span<const int64_t> rows_received, const void* sent,
                std::span<const int64_t> rows_sent, int64_t row_bytes);
  int64_t count(int64_t source, int64_t expert) const;
  bool begin_round();

  Context& ctx_;
  ExpertRanks ranks_;
  Tensor offsets_, row_numbers_;
  // Memory that the host reads and writes: that of the tensors, or copies for a GPU.
  const int32_t *counts_ = nullptr, *row_offsets_ = nullptr;  // (ranks, E), (E + 1)
  int32_t* round_offsets_ = nullptr;                          // (ranks, experts here + 1)
  std::vector<int32_t> copies_;
  std::vector<int64_t> host_numbers_;
  int64_t rows_, most_, experts_, experts_here_, own_rows_ = 0, round_ = -1;
  int64_t own_first_ = 0, own_count_ = 0;  // in own_rows_, for this round
  // (ranks) each: the next run for a destination; this rank's first row for it in this round, the numbers of
  // rows sent to and received from it (none for this rank itself), and sizes in bytes.
  std::span<int64_t> next_run_, first_row_, rows_to_, rows_from_, bytes_received_, bytes_sent_;
};

}  // namespace sluice
