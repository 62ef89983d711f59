#pragma once
// Rows of tokens of sequences that several ranks share (parallel.context), brought together for measurements
// that need whole sequences.
#include <vector>

#include "core/context.h"
#include "nn/sequence_ranks.h"

namespace sluice {

/// Collective. rows (T, width) of every rank in the order of the sequences, (N T, width), on all of them; the
/// rows themselves without ranks, and in a dry run.
std::vector<double> whole_rows(Context& ctx, const SequenceRanks* ranks, std::vector<double> rows,
                               int64_t width);

/// The same of statistics (heads, T), by head: (heads, N T).
std::vector<double> whole_statistics(Context& ctx, const SequenceRanks* ranks, std::vector<double> values,
                                     int64_t heads);

}  // namespace sluice
