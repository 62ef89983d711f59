#pragma once
// What the keys that sparse attention selects hold of dense attention (README.md).
#include <limits>

#include "analysis/queries.h"
#include "analysis/sums.h"
#include "core/context.h"
#include "core/host_view.h"
#include "nn/transformer.h"

namespace sluice {

/// Sums over the queries of one layer that are looked at: up to kLookedAt of each sequence, evenly spaced,
/// the last one among them.
struct SelectionSums {
  static constexpr int64_t kLookedAt = 32, kNeighbours = 8;
  double queries = 0;  // (query, index set) pairs
  double mass = 0;     // share of dense attention, mean over the set's heads, on the selected keys
  double top = 0;  // share of the keys with most dense attention, as many as are selected, that are selected
  double keys = 0, keys_squares = 0;  // number of selected keys, and its square
  double keys_least = std::numeric_limits<double>::infinity(), keys_most = 0;
  double divergence = 0;     // the indexer's loss (ops/indexer.h) on the selected keys
  double union_queries = 0;  // pairs with kNeighbours queries of the same sequence up to the query
  double union_ratio = 0;    // |union of their keys| over the mean number of keys
  double overlap_queries = 0;  // pairs in a layer whose layer before selects keys, too
  double overlap = 0;          // share of the keys that the layer before selects for the same query

  void add_parts(Parts& parts);  // for ranks: see analysis/sums.h
};

/// Means of these, and the spread of the number of keys. NaN where no query has them.
struct SelectionSummary {
  double mass = 0, top = 0, divergence = 0, union_ratio = 0, overlap = 0;
  double keys = 0, keys_deviation = 0, keys_least = 0, keys_most = 0;
};
SelectionSummary means_of(const SelectionSums& sums);

/// |union of the keys of kNeighbours queries up to t| over their mean number, of row `row` of a selection on
/// the host and the rows before it; `first` is their first visible key.
double union_over_keys(const Selection& selection, int64_t set, int64_t row, int64_t t, int64_t first);

/// A selection on the host, wherever it was made.
class HostSelection {
 public:
  HostSelection(Context& ctx, const Selection& s) : first_(ctx, s.first), count_(ctx, s.count), host_(s) {
    host_.first = first_.tensor(), host_.count = count_.tensor();
  }
  const Selection& operator*() const { return host_; }

 private:
  HostView first_, count_;
  Selection host_;
};

/// Collective where ranks share the sequences. The selection of these tokens, whose rows are numbered as they
/// are.
struct SelectedRows : Selection {
  SelectedRows(const Selection& all, const std::vector<int64_t>& tokens, const SequenceRanks* ranks);
  SelectedRows(const SelectedRows&) = delete;

 private:
  std::vector<int32_t> first_, count_;
};

/// Adds a layer after a forward pass in the sparse phase; first_key (T) i32 and queries of the batch; before:
/// the layer before, or nullptr. In f64, on the host. Collective where ranks share the sequences: all of them
/// then add the same queries, those of all.
void add_selection(Context& ctx, SelectionSums& sums, const Attention& attention, const Attention::Saved& s,
                   const Attention::Saved* before, const Tensor& first_key, const Queries& queries,
                   const SequenceRanks* ranks = nullptr);

}  // namespace sluice
