#include "nn/dispatch.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "config/derived.h"
#include "core/host_view.h"

namespace sluice {
namespace {

/// n zeros in a scope of host memory; null in a dry run.
std::span<int64_t> numbers(ScratchScope& t, const char* name, int64_t n) {
  const Tensor memory = t.alloc(name, DType::u8, {n * static_cast<int64_t>(sizeof(int64_t))});
  if (!memory.data) return {};
  auto* first = static_cast<int64_t*>(memory.data);
  std::fill_n(first, n, 0);
  return {first, static_cast<size_t>(n)};
}

}  // namespace

int64_t ExpertRanks::most_rows(int64_t T, int64_t K, int64_t E) const {
  return receive_rows(T, K, E, size(), capacity);
}

void Dispatch::plan(Context& ctx, const ExpertRanks& ranks, Tensor counts, const Permutation& permutation) {
  const ProfileScope profile(ctx.profile, "dispatch_plan");
  if (ctx.dry_run) return;
  const int64_t E = counts.dim(1), here = E / ranks.size();
  const HostView offsets_view(ctx, permutation.offsets);
  HostView counts_view(ctx, counts, HostView::Content::uninitialized);
  const Tensor& all = counts_view.tensor();
  int32_t* mine = all.rows(ranks.rank(), 1).as<int32_t>();
  const int32_t* offsets = offsets_view.tensor().as<int32_t>();
  for (int64_t e = 0; e < E; ++e) mine[e] = offsets[e + 1] - offsets[e];
  ranks.ranks->all_gather(all.data, mine, E * dtype_size(DType::i32));
  for (int r = 0; r < ranks.size(); ++r) {
    const int32_t* row = all.rows(r, 1).as<int32_t>();
    const int64_t rows = std::accumulate(row, row + E, int64_t{0});
    SLUICE_CHECK(
        rows == offsets[E],
        "experts: rank {} has {} rows for them and rank {} has {}; all ranks must have the same number", r,
        rows, ranks.rank(), offsets[E]);
  }
  counts_view.write_back();
  const int32_t begin = offsets[ranks.rank() * here], end = offsets[(ranks.rank() + 1) * here];
  move_rows_last(ctx, permutation.rows, begin, end - begin, offsets[E]);
}

Dispatch::Dispatch(Context& ctx, ScratchScope& t, const ExpertRanks& ranks, const Tensor& counts,
                   const Permutation& permutation, int64_t most)
    : ctx_(ctx),
      ranks_(ranks),
      rows_(permutation.slots.dim(0)),
      most_(most),
      experts_(counts.dim(1)),
      experts_here_(counts.dim(1) / ranks.size()) {
  const int64_t n = ranks.size();
  offsets_ = t.alloc("dispatch.offsets", DType::i32, {n, experts_here_ + 1});
  row_numbers_ = t.alloc("dispatch.row_numbers", DType::i32, {most});
  const bool on_gpu = ctx.device != Device::cpu;
  if (on_gpu && !ctx.dry_run) host_numbers_.assign(static_cast<size_t>(6 * n), 0);
  size_t taken = 0;
  const auto of_ranks = [&](const char* name) {
    if (!on_gpu) return numbers(t, name, n);
    if (ctx.dry_run) return std::span<int64_t>();
    return std::span<int64_t>(host_numbers_.data() + n * static_cast<int64_t>(taken++),
                              static_cast<size_t>(n));
  };
  next_run_ = of_ranks("dispatch.next_run");
  first_row_ = of_ranks("dispatch.first_row");
  rows_to_ = of_ranks("dispatch.rows_to");
  rows_from_ = of_ranks("dispatch.rows_from");
  bytes_received_ = of_ranks("dispatch.bytes_received");
  bytes_sent_ = of_ranks("dispatch.bytes_sent");
  number_rows(ctx, row_numbers_);
  if (ctx.dry_run) return;
  read_counts(counts, permutation.offsets);
  const int32_t* offset = row_offsets_;
  for (int64_t r = 0; r < n; ++r) first_row_[static_cast<size_t>(r)] = offset[r * experts_here_];
  const int64_t rank = ranks.rank();
  own_rows_ = offset[(rank + 1) * experts_here_] - offset[rank * experts_here_];
}

/// Host copies of tensors that the host reads and writes.
void Dispatch::read_counts(const Tensor& counts, const Tensor& offsets) {
  if (ctx_.device == Device::cpu) {
    counts_ = counts.as<int32_t>();
    row_offsets_ = offsets.as<int32_t>();
    round_offsets_ = offsets_.as<int32_t>();
    return;
  }
  copies_.resize(static_cast<size_t>(counts.numel() + offsets.numel() + offsets_.numel()));
  int32_t *first = copies_.data(), *second = first + counts.numel();
  read_tensor(ctx_, first, counts);
  read_tensor(ctx_, second, offsets);
  counts_ = first;
  row_offsets_ = second;
  round_offsets_ = second + offsets.numel();
}

int64_t Dispatch::count(int64_t source, int64_t expert) const { return counts_[source * experts_ + expert]; }

bool Dispatch::next() {
  ++round_;
  return ctx_.dry_run ? round_ < 2 : begin_round();
}

bool Dispatch::begin_round() {
  const int64_t runs = ranks_.size() * experts_here_;
  if (round_ > 0 && std::all_of(next_run_.begin(), next_run_.end(), [&](int64_t run) { return run == runs; }))
    return false;
  own_first_ += own_count_;
  own_count_ = 0;
  std::fill(rows_from_.begin(), rows_from_.end(), 0);
  std::fill_n(round_offsets_, offsets_.numel(), 0);
  for (int64_t to = 0; to < ranks_.size(); ++to) {
    const auto d = static_cast<size_t>(to);
    const bool here = to == ranks_.rank();
    first_row_[d] += rows_to_[d];
    rows_to_[d] = 0;
    const int64_t first = next_run_[d];
    int64_t room = most_;
    for (int64_t& run = next_run_[d]; run < runs; ++run) {
      const int64_t source = run / experts_here_, expert = run % experts_here_;
      const int64_t rows = count(source, to * experts_here_ + expert);
      if (rows > room) break;
      room -= rows;
      const bool own = source == ranks_.rank();
      if (own) (here ? own_count_ : rows_to_[d]) += rows;
      if (!here) continue;
      if (!own) rows_from_[static_cast<size_t>(source)] += rows;
      round_offsets_[source * (experts_here_ + 1) + expert + 1] = static_cast<int32_t>(rows);
    }
    SLUICE_CHECK(next_run_[d] > first || first == runs,
                 "experts: rank {} has to receive {} rows of one expert, but its capacity is {}", to,
                 count(first / experts_here_, to * experts_here_ + first % experts_here_), most_);
  }
  for (int64_t source = 0; source < ranks_.size(); ++source) {
    int32_t* ends = round_offsets_ + source * (experts_here_ + 1);
    std::partial_sum(ends, ends + experts_here_ + 1, ends);
  }
  if (ctx_.device != Device::cpu) write_tensor(ctx_, offsets_, round_offsets_);
  return true;
}

Dispatch::Part Dispatch::from(int source) const {
  // In a dry run all rows belong to one rank.
  if (ctx_.dry_run)
    return {0, source == ranks_.rank() ? 0 : source == (ranks_.rank() == 0 ? 1 : 0) ? most_ : 0};
  const auto first = rows_from_.begin();
  if (source == ranks_.rank()) return {std::accumulate(first, rows_from_.end(), int64_t{0}), own_count_};
  return {std::accumulate(first, first + source, int64_t{0}), rows_from_[static_cast<size_t>(source)]};
}

Dispatch::Part Dispatch::own() const {
  if (ctx_.dry_run) return {};
  return {first_row_[static_cast<size_t>(ranks_.rank())] + own_first_, own_count_};
}

int64_t Dispatch::own_place() const { return ctx_.dry_run ? 0 : rows_ - own_rows_ + own_first_; }

void Dispatch::exchange(void* received, std::span<const int64_t> rows_received, const void* sent,
                        std::span<const int64_t> rows_sent, int64_t row_bytes) {
  for (size_t r = 0; r < rows_sent.size(); ++r) {
    bytes_received_[r] = rows_received[r] * row_bytes;
    bytes_sent_[r] = rows_sent[r] * row_bytes;
  }
  ranks_.moves->all_to_all_v(received, bytes_received_.data(), sent, bytes_sent_.data());
}

void Dispatch::to_experts(Tensor received, const Tensor& all, const Tensor& index) {
  const ProfileScope profile(ctx_.profile, "dispatch_rows");
  const int64_t row_bytes = all.dim(1) * dtype_size(all.dtype);
  ScratchScope t(ctx_.scratch);
  const Tensor packed = t.alloc("dispatch.packed", all.dtype, {rows_, all.dim(1)});
  if (ctx_.dry_run) return;
  int64_t at = 0;
  for (size_t r = 0; r < rows_to_.size(); at += rows_to_[r++])
    take_rows(ctx_, packed.rows(at, rows_to_[r]), all, index.rows(first_row_[r], rows_to_[r]));
  exchange(received.data, rows_from_, packed.data, rows_to_, row_bytes);
}

void Dispatch::from_experts(Tensor all, const Tensor& computed, const Tensor& index) {
  const ProfileScope profile(ctx_.profile, "combine_rows");
  const int64_t row_bytes = all.dim(1) * dtype_size(all.dtype);
  ScratchScope t(ctx_.scratch);
  const Tensor packed = t.alloc("dispatch.packed", all.dtype, {rows_, all.dim(1)});
  if (ctx_.dry_run) return;
  // Rows that return without an index are written directly to their positions.
  if (!index && std::accumulate(rows_to_.begin(), rows_to_.end(), own_rows_) == rows_)
    return exchange(all.data, rows_to_, computed.data, rows_from_, row_bytes);
  exchange(packed.data, rows_to_, computed.data, rows_from_, row_bytes);
  int64_t at = 0;
  for (size_t r = 0; r < rows_to_.size(); at += rows_to_[r++]) {
    const Tensor came = packed.rows(at, rows_to_[r]);
    const int64_t place = first_row_[r] - (static_cast<int>(r) > ranks_.rank() ? own_rows_ : 0);
    if (index)
      put_rows(ctx_, all, came, index.rows(first_row_[r], rows_to_[r]));
    else
      copy(ctx_, all.rows(place, rows_to_[r]), came);
  }
}

}  // namespace sluice
