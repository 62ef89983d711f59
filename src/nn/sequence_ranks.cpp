#include "nn/sequence_ranks.h"

#include <cstring>
#include <memory>
#include <vector>

#include "core/device.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"
#include "ops/window.h"

namespace sluice {
namespace {

/// Bytes of a row.
int64_t row_bytes(const Tensor& t) { return t.dim(0) > 0 ? t.bytes() / t.dim(0) : 0; }

/// to (n, m) from (m, n), in host memory.
void transpose(Context& ctx, const Tensor& to, const Tensor& from) {
  if (ctx.dry_run) return;
  const int64_t m = from.dim(0), n = from.dim(1);
  const auto size = static_cast<size_t>(dtype_size(from.dtype));
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      std::memcpy(static_cast<char*>(to.data) + static_cast<size_t>(j * m + i) * size,
                  static_cast<const char*>(from.data) + static_cast<size_t>(i * n + j) * size, size);
}

/// Of a rank's first tokens among those of all ranks, behind `before` others.
std::vector<int32_t> places(const SequenceSplit& split, int64_t before, int64_t tokens) {
  std::vector<int32_t> found;
  for (int64_t t = 0; t < tokens; ++t) found.push_back(static_cast<int32_t>(before + split.token_of(t)));
  return found;
}

}  // namespace

SequenceRanks::SequenceRanks(Communicator& ranks, int64_t seq_len, CommQueue* queue, Communicator* of_gpus)
    : ranks_(ranks),
      of_device_(of_gpus ? *of_gpus : ranks),
      queue_(queue),
      split_{.ranks = ranks.size(), .rank = ranks.rank(), .seq_len = seq_len} {
  SLUICE_CHECK(ranks.size() > 1 && seq_len % (2 * ranks.size()) == 0,
               "SequenceRanks: {} tokens in 2 chunks on each of {} ranks", seq_len, ranks.size());
}

void SequenceRanks::allocate(Context& ctx, Arena& arena, int64_t tokens) {
  own_key_ = arena.alloc("context.own_key", DType::i32, {tokens});
  if (arena.measuring()) return;
  write_tensor(ctx, own_key_, places(split_, 0, tokens).data());
}

Tensor SequenceRanks::own_key_behind(Context& ctx, ScratchScope& t, int64_t before, int64_t tokens) const {
  const Tensor own_key = t.alloc("context.own_key", DType::i32, {tokens});
  if (ctx.dry_run) return own_key;
  write_tensor(ctx, own_key, places(split_, before, tokens).data());
  return own_key;
}

/// The heads of a sample are gathered in the order of the sequence, the tails in the opposite one.
SequenceRanks::Gather SequenceRanks::begin_gather(Context& ctx, Tensor whole, const Tensor& rows) const {
  SLUICE_CHECK(whole.dim(0) == rows.dim(0) * split_.ranks && rows.dim(0) % split_.length() == 0,
               "SequenceRanks: {} of {} ranks into {}", rows.describe(), split_.ranks, whole.describe());
  Gather gather = {.whole = whole};
  if (ctx.dry_run) return gather;
  gather.ticket =
      post(ctx, [this, to = static_cast<char*>(whole.data), from = static_cast<const char*>(rows.data),
                 bytes = split_.chunk() * row_bytes(rows), chunks = rows.dim(0) / split_.chunk()] {
        for (int64_t c = 0; c < chunks; ++c)
          of_device_.all_gather(to + c * split_.ranks * bytes, from + c * bytes, bytes);
      });
  return gather;
}

/// Communication of what ctx has computed until now, beside what it computes from now on.
CommQueue::Ticket SequenceRanks::post(Context& ctx, std::function<void()> work) const {
  if (!queue_) {
    work();
    return 0;
  }
  const auto computed = std::make_shared<Mark>();
  computed->set(ctx);
  return queue_->post([this, work = std::move(work), computed] {
    computed->await(queue_->context());
    work();
    synchronize(queue_->context());
  });
}

Tensor SequenceRanks::finish(Context& ctx, const Gather& gather) const {
  const int64_t half = split_.seq_len / 2;
  if (queue_ && !ctx.dry_run) queue_->wait(gather.ticket);
  for (int64_t at = half; at < gather.whole.dim(0); at += split_.seq_len)
    reverse_tail(ctx, gather.whole.rows(at, half));
  return gather.whole;
}

Tensor SequenceRanks::room(ScratchScope& t, const Tensor& rows) const {
  Tensor all = rows;
  all.shape[0] *= split_.ranks;
  all.data = t.alloc("context.whole", rows.dtype, {all.numel()}).data;
  return all;
}

Tensor SequenceRanks::whole(Context& ctx, ScratchScope& t, const Tensor& rows) const {
  return finish(ctx, begin_gather(ctx, room(t, rows), rows));
}

Tensor SequenceRanks::whole_heads(Context& ctx, ScratchScope& t, const Tensor& heads) const {
  const int64_t H = heads.dim(0), T = heads.dim(1), all = split_.ranks * T;
  const Tensor result = t.alloc("context.whole_heads", heads.dtype, {H, all});
  ScratchScope temporary(ctx.scratch);
  const Tensor rows = temporary.alloc("context.by_token", heads.dtype, {T, H});
  transpose(ctx, rows, heads);
  transpose(ctx, result, whole(ctx, temporary, rows));
  return result;
}

Batch SequenceRanks::whole_batch(Context& ctx, ScratchScope& t, const Batch& batch) const {
  Batch all = {whole(ctx, t, batch.tokens), whole(ctx, t, batch.targets), whole(ctx, t, batch.positions),
               t.alloc("context.whole_first_key", DType::i32, {split_.ranks * batch.first_key.dim(0)})};
  gather_first_keys(ctx, all.first_key, batch.first_key, own_key(batch.first_key.dim(0)));
  return all;
}

void SequenceRanks::take_own(Context& ctx, Tensor rows, const Tensor& whole) const {
  const int64_t c = split_.chunk();
  SLUICE_CHECK(whole.dim(0) == rows.dim(0) * split_.ranks && rows.dim(0) % split_.length() == 0,
               "SequenceRanks: {} of {} ranks from {}", rows.describe(), split_.ranks, whole.describe());
  for (int64_t i = 0; i < rows.dim(0) / c; ++i)
    copy(ctx, rows.rows(i * c, c), whole.rows(i / 2 * split_.seq_len + split_.begin(split_.rank, i % 2), c));
}

Tensor SequenceRanks::gather_first_keys(Context& ctx, Tensor whole, const Tensor& first_key,
                                        const Tensor& own_key) const {
  ScratchScope scratch(ctx.scratch);
  const Tensor mine = scratch.like("context.first_key", first_key);
  absolute_first_key(ctx, mine, first_key, own_key);
  return finish(ctx, begin_gather(ctx, whole, mine));
}

/// The chunks of the later half of a sequence, (seq_len / 2, ...), change between the sequence's order and
/// that of the ranks.
void SequenceRanks::reverse_tail(Context& ctx, const Tensor& tail) const {
  ScratchScope t(ctx.scratch);
  const int64_t c = split_.chunk();
  const Tensor kept = t.like("context.chunk", tail.rows(0, c));
  for (int64_t i = 0; i < split_.ranks / 2; ++i) {
    const Tensor a = tail.rows(i * c, c), b = tail.rows((split_.ranks - 1 - i) * c, c);
    copy(ctx, kept, a);
    copy(ctx, a, b);
    copy(ctx, b, kept);
  }
}

SequenceRanks::Scatter SequenceRanks::begin_scatter(Context& ctx, Tensor received,
                                                    const Tensor& whole) const {
  SLUICE_CHECK(received.numel() == whole.numel() && whole.dim(0) % split_.seq_len == 0,
               "SequenceRanks: {} sent into {}", whole.describe(), received.describe());
  const int64_t half = split_.seq_len / 2, halves = whole.dim(0) / half;
  for (int64_t i = 1; i < halves; i += 2) reverse_tail(ctx, whole.rows(i * half, half));
  Scatter scatter = {.received = received};
  if (ctx.dry_run) return scatter;
  scatter.ticket =
      post(ctx, [this, to = static_cast<char*>(received.data), from = static_cast<const char*>(whole.data),
                 bytes = half * row_bytes(whole), halves] {
        for (int64_t i = 0; i < halves; ++i)
          of_device_.all_to_all(to + i * bytes, from + i * bytes, bytes / split_.ranks);
      });
  return scatter;
}

void SequenceRanks::finish(Context& ctx, Tensor rows, const Scatter& scatter) const {
  SLUICE_CHECK(rows.numel() * split_.ranks == scatter.received.numel(),
               "SequenceRanks: {} of {} ranks from {}", rows.describe(), split_.ranks,
               scatter.received.describe());
  const int64_t half = split_.seq_len / 2, c = split_.chunk();
  if (queue_ && !ctx.dry_run) queue_->wait(scatter.ticket);
  for (int64_t i = 0; i < scatter.received.dim(0) / half; ++i)
    sum(ctx, rows.rows(i * c, c), scatter.received.rows(i * half, half));
}

void SequenceRanks::reduce_scatter(Context& ctx, Tensor rows, const Tensor& whole) const {
  ScratchScope t(ctx.scratch);
  finish(ctx, rows, begin_scatter(ctx, t.like("context.received", whole), whole));
}

void SequenceRanks::sum(Context& ctx, Tensor rows, const Tensor& received) const {
  const int64_t n = rows.numel();
  if (rows.dtype != DType::bf16)
    return sum_rows(ctx, rows.view({n}), received.view({split_.ranks, n}), Into::overwrite);
  ScratchScope t(ctx.scratch);
  const Tensor wide = t.alloc("context.received_wide", DType::f32, {split_.ranks, n}),
               total = t.alloc("context.sum", DType::f32, {n});
  cast(ctx, wide.view({split_.ranks * n}), received.view({split_.ranks * n}));
  sum_rows(ctx, total, wide, Into::overwrite);
  cast(ctx, rows.view({n}), total);
}

void take_part(const SequenceSplit& split, const Batch& part, int64_t i, const Batch& whole) {
  for (int64_t t = 0; t < split.length(); ++t) {
    const int64_t from = split.place(t), to = i * split.length() + t;
    part.tokens.as<int32_t>()[to] = whole.tokens.as<int32_t>()[from];
    part.targets.as<int32_t>()[to] = whole.targets.as<int32_t>()[from];
    part.positions.as<int32_t>()[to] = whole.positions.as<int32_t>()[from];
    part.first_key.as<int32_t>()[to] =
        static_cast<int32_t>(to - (from - whole.first_key.as<int32_t>()[from]));
  }
}

}  // namespace sluice
