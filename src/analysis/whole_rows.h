#pragma once
// Rows of tokens of sequences that several ranks share (parallel.context), brought together for measurements
// that need whole sequences.
#include <algorithm>
#include <vector>

#include "analysis/sums.h"
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

/// Collective. Merges numbers that each rank has of its own tokens, in the order of the ranks: all of them
/// have those of the sequences then. Nothing without ranks.
void merge_tokens(const SequenceRanks* ranks, const Parts& parts);

/// Collective. The rows of `tokens`, counted among those of all ranks, from rows (T, width) of every rank, on
/// all of them: (tokens, width). Without ranks the rows of these tokens.
template <class V>
std::vector<V> rows_of_tokens(const SequenceRanks* ranks, const std::vector<int64_t>& tokens, const V* rows,
                              int64_t width) {
  std::vector<V> mine(tokens.size() * static_cast<size_t>(width));
  const auto row = [&](std::vector<V>& x, size_t i) { return x.data() + static_cast<int64_t>(i) * width; };
  if (!ranks) {
    for (size_t i = 0; i < tokens.size(); ++i) std::copy_n(rows + tokens[i] * width, width, row(mine, i));
    return mine;
  }
  const SequenceSplit& split = ranks->split();
  const auto rank_of = [&](size_t i) { return split.rank_of(tokens[i] % split.seq_len); };
  for (size_t i = 0; i < tokens.size(); ++i)
    if (const int64_t sample = tokens[i] / split.seq_len; rank_of(i) == split.rank)
      std::copy_n(rows + (sample * split.length() + split.index_of(tokens[i] % split.seq_len)) * width, width,
                  row(mine, i));
  std::vector<V> all(mine.size() * static_cast<size_t>(split.ranks));
  ranks->ranks().all_gather(all.data(), mine.data(), std::ssize(mine) * static_cast<int64_t>(sizeof(V)));
  for (size_t i = 0; i < tokens.size(); ++i)
    std::copy_n(all.data() + rank_of(i) * std::ssize(mine) + static_cast<int64_t>(i) * width, width,
                row(mine, i));
  return mine;
}

/// Collective. The first visible keys of these tokens, counted among the tokens of all ranks, from first_key
/// (T) i32 of every rank's batch, on the host.
std::vector<int64_t> first_keys_of(const Tensor& first_key, const std::vector<int64_t>& tokens,
                                   const SequenceRanks* ranks);

}  // namespace sluice
