#include "analysis/whole_rows.h"

#include <algorithm>
#include <utility>

namespace sluice {
namespace {

/// (rows, columns) to (columns, rows).
std::vector<double> transposed(const std::vector<double>& x, size_t columns) {
  const size_t rows = x.size() / columns;
  std::vector<double> out(x.size());
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < columns; ++c) out[c * rows + r] = x[r * columns + c];
  return out;
}

}  // namespace

std::vector<double> whole_rows(Context& ctx, const SequenceRanks* ranks, std::vector<double> rows,
                               int64_t width) {
  if (!ranks || ctx.dry_run || rows.empty()) return rows;
  const int64_t T = std::ssize(rows) / width;
  SequenceSplit split = ranks->split();
  std::vector<double> parts(rows.size() * static_cast<size_t>(split.ranks)), whole(parts.size());
  ranks->ranks().all_gather(parts.data(), rows.data(),
                            std::ssize(rows) * static_cast<int64_t>(sizeof(double)));
  for (split.rank = 0; split.rank < split.ranks; ++split.rank)
    for (int64_t t = 0; t < T; ++t) {
      std::copy_n(parts.data() + (split.rank * T + t) * width, width,
                  whole.data() + split.token_of(t) * width);
    }
  return whole;
}

std::vector<double> whole_statistics(Context& ctx, const SequenceRanks* ranks, std::vector<double> values,
                                     int64_t heads) {
  if (!ranks || values.empty()) return values;
  const auto T = values.size() / static_cast<size_t>(heads);
  const std::vector<double> whole = whole_rows(ctx, ranks, transposed(values, T), heads);
  return transposed(whole, static_cast<size_t>(heads));
}

std::vector<int64_t> first_keys_of(const Tensor& first_key, const std::vector<int64_t>& tokens,
                                   const SequenceRanks* ranks) {
  std::vector<int64_t> before(static_cast<size_t>(first_key.dim(0)));  // how far before its token
  for (size_t t = 0; t < before.size(); ++t) before[t] = static_cast<int64_t>(t) - first_key.as<int32_t>()[t];
  std::vector<int64_t> first = rows_of_tokens(ranks, tokens, before.data(), 1);
  for (size_t i = 0; i < tokens.size(); ++i) first[i] = tokens[i] - first[i];
  return first;
}

void merge_tokens(const SequenceRanks* ranks, const Parts& parts) {
  if (!ranks) return;
  const int64_t size = packed_size(parts);
  std::vector<double> mine(static_cast<size_t>(size)), all(static_cast<size_t>(size * ranks->split().ranks));
  pack(mine.data(), parts);
  ranks->ranks().all_gather(all.data(), mine.data(), size * static_cast<int64_t>(sizeof(double)));
  const double* from = all.data();
  for (const Part& part : parts) std::copy_n(std::exchange(from, from + part.size), part.size, part.data);
  for (int64_t r = 1; r < ranks->split().ranks; ++r) merge_packed(parts, all.data() + r * size);
}

}  // namespace sluice
