#pragma once
// Rows of tokens to the ranks that hold their experts, and back: dropless, in memory of a stated size.
//
// All ranks know what each of them has for each expert, so that all come to the same plan. What one rank is
// to receive has an order: by source, then expert, then slot. A round takes from it the next runs, all of a
// source's rows for an expert, that fit into a stated number of rows; there are as many rounds as the fullest
// rank needs. A run is never cut, and runs of an expert come in the order of the sources: what is summed over
// rows, the experts' gradients, is the same in any number of rounds. Rows whose expert is where their token
// is take part in rounds, but nobody copies them.
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"
#include "core/context.h"
#include "ops/permute.h"

namespace sluice {

/// The ranks that share the experts of a model, and how much each takes in at once.
struct ExpertRanks {
  ExpertRanks(Communicator* ranks_ = nullptr, double capacity_ = ParallelConfig().expert_capacity,
              Communicator* moves_ = nullptr)
      : ranks(ranks_), capacity(capacity_), moves(moves_ ? moves_ : ranks_) {}

  Communicator* ranks;  // Mesh::expert; none: all experts are here
  double capacity;      // parallel.expert_capacity
  Communicator*
      moves;  // the same ranks, for memory where the rows are; its operations begin after the ops of the step

  int size() const { return ranks ? ranks->size() : 1; }
  int rank() const { return ranks ? ranks->rank() : 0; }
  /// Rows that a rank receives in one round at most, of T tokens per rank with K experts each, E in all:
  /// never more than there can be, and never less than the largest run.
  int64_t most_rows(int64_t tokens, int64_t experts_per_token, int64_t experts) const;
};

/// One way to the experts and back, round by round. The plan is made by the host: on a GPU, it waits for it.
/// Every rank of ExpertRanks goes through the same calls. In a dry run nobody is asked: there are two rounds,
/// as full as can be.
class Dispatch {
 public:
  /// counts (ranks, E) i32 overwritten: rows that each rank has for each expert. Collective. permutation.rows
  /// becomes the place of every slot's row among results: rows that have travelled lie there in the
  /// permutation's order, this rank's own behind them.
  static void plan(Context& ctx, const ExpertRanks& ranks, Tensor counts, const Permutation& permutation);

  /// counts and permutation: of this rank's T K rows, after plan(). most: ExpertRanks::most_rows. Work memory
  /// is taken from t and, in every call, from ctx.scratch.
  Dispatch(Context& ctx, ScratchScope& t, const ExpertRanks& ranks, const Tensor& counts,
           const Permutation& permutation, int64_t most);

  /// The next round, from the first on; false after the last.
  bool next();
  int64_t round() const { return round_; }

  /// Rows of this round from a rank, sorted by expert: [begin, begin + count) of what was received; of this
  /// rank itself, behind all that were.
  struct Part {
    int64_t begin = 0, count = 0;
  };
  Part from(int source) const;
  /// (experts here + 1) i32: which of them are which expert's, counted from begin.
  Tensor offsets(int source) const { return offsets_.rows(source, 1).view({offsets_.dim(1)}); }
  /// This rank's own of this round: rows of the permutation, and their place among results.
  Part own() const;
  int64_t own_place() const;
  /// (most) i32: 0, 1, 2, ...
  const Tensor& row_numbers() const { return row_numbers_; }

  /// received (most, width), its first rows overwritten by what other ranks send here in this round: of a
  /// sender's `all` (any, width), row index[i] stands for row i of its permutation.
  void to_experts(Tensor received, const Tensor& all, const Tensor& index);
  /// The way back: computed (most, width) is of what was received. What comes back for row i of the
  /// permutation is written to row index[i] of all (any, width); without an index to its place among results,
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
  // Where the host reads and writes: the tensors' own memory, or, of a GPU's, copies.
  const int32_t *counts_ = nullptr, *row_offsets_ = nullptr;  // (ranks, E), (E + 1)
  int32_t* round_offsets_ = nullptr;                          // (ranks, experts here + 1)
  std::vector<int32_t> copies_;
  std::vector<int64_t> host_numbers_;
  int64_t rows_, most_, experts_, experts_here_, own_rows_ = 0, round_ = -1;
  int64_t own_first_ = 0, own_count_ = 0;  // of own_rows_, in this round
  // (ranks) each: the first run of a destination that has not travelled; this rank's first row to it in this
  // round, how many go, and how many come from it, none of this rank itself; and sizes in bytes.
  std::span<int64_t> next_run_, first_row_, rows_to_, rows_from_, bytes_received_, bytes_sent_;
};

}  // namespace sluice
