#include "optim/grad_sync.h"

#include <algorithm>
#include <limits>

#include "comm/reduce.h"
#include "ops/elementwise.h"
#include "ops/fixed_sum.h"
#include "ops/reduce.h"

namespace sluice {
namespace {

/// rows[0] += the other rows, as tree(0, count) of core/tree_sum.h; the other rows are overwritten.
void add_tree(Context& ctx, const Tensor* rows, size_t count) {
  if (count < 2) return;
  size_t half = 1;
  while (2 * half < count) half *= 2;
  add_tree(ctx, rows, half);
  add_tree(ctx, rows + half, count - half);
  add_forward(ctx, rows[0], rows[0], rows[half]);
}

}  // namespace

GradSync::GradSync(const ParallelConfig& config, ParamStore& store, const Mesh& mesh, const Mesh& moves,
                   CommQueue* queue)
    : config_(config), store_(store), mesh_(mesh), moves_(moves), queue_(queue) {
  SLUICE_CHECK(queue || mesh.tokens().size() == 1, "GradSync: several ranks need a queue");
}

void GradSync::allocate(Arena& arena, int64_t micro_batches) {
  micro_batches_ = micro_batches;
  pieces_ = store_.pieces(mesh_.tokens().rank(), mesh_.expert_data().rank());
  const DType wide = accumulate_dtype(store_.dtype());
  kept_.clear();
  int64_t at = 0, fixed_at = 0, largest = 0;
  for (const ParamStore::Piece& p : pieces_) {
    const int64_t length = p.of.end - p.of.begin;
    Kept kept{.rows = counted_sources(p.of), .length = length, .at = at, .fixed_at = fixed_at};
    if (sharded()) {
      kept.rows *= counted_ranks(p.of);
      kept.length = p.count;
    }
    at += kept.rows * kept.length;
    fixed_at += kept.length;
    largest = std::max(largest, length * (sharded() ? counted_sources(p.of) : 1));
    kept_.push_back(kept);
  }
  computed_.clear();
  computed_.resize(pieces_.size());
  levels_.clear();
  if (tree() && !in_place())
    for (int64_t m = 1; m < micro_batches; m *= 2)
      levels_.push_back(arena.alloc("gradient tree", wide, {at}));
  fixed_ = fixed() ? arena.alloc("fixed-point gradients", DType::i32, {fixed_at, 2}) : Tensor();
  bad_ = fixed() ? arena.alloc("bad gradient", DType::i32, {1, 2}) : Tensor();
  shards_ = sharded() ? arena.alloc("gradient shards", wide, {ParamStore::size_of(pieces_)}) : Tensor();
  received_ = Tensor();
  if (!alone() || sharded())
    received_ = fixed() && !sharded() ? arena.alloc("gradients of other ranks", DType::i32, {largest, 2})
                                      : arena.alloc("gradients of other ranks", wide, {largest});
  if (!alone() && config_.gradient_dtype == GradientDtype::bf16) wire_.allocate(arena, largest);
  bins_ = arena.alloc("square bins", DType::f64, {kSquareBins});
}

void GradSync::begin_step(Context& ctx, int64_t step) {
  step_ = step;
  if (in_place() && !by_unit(ctx)) store_.zero_grads(ctx);
  if (ctx.dry_run) return;
  if (fixed()) write_tensor(ctx, bad_, &kNoneBad);
  if (sharded() && !exact())
    fill(ctx, shards_, 0.0);  // exact sums are complete only after the last micro-batch
}

void GradSync::begin_micro_batch(Context& ctx, int64_t i) {
  micro_batch_ = i;
  units_begun_ = 0;
  begin(ctx, 0, Pass::backward);
}

void GradSync::begin(Context& ctx, int unit, Pass pass) {
  if (pass == Pass::forward || (in_place() && (!by_unit(ctx) || micro_batch_ > 0))) return;
  if (sharded()) {
    if (queue_) queue_->wait(busy(unit));  // its previous content has been sent to its owners
    store_.place_grads(unit);
  }
  store_.begin_sums(ctx, unit);
  ++units_begun_;
}

void GradSync::end(Context& ctx, int unit, Pass pass) {
  if (pass == Pass::forward) return;
  store_.end_sums(ctx, unit);
  if (ctx.dry_run) return;
  if (in_place() && (alone() || !last())) return;
  sum_unit(ctx, unit);
}

void GradSync::end_micro_batch(Context& ctx) {
  SLUICE_CHECK(units_begun_ == 0 || units_begun_ == store_.num_units(),
               "GradSync: the gradients of {} of {} units began at zero", units_begun_, store_.num_units());
  end(ctx, 0, Pass::backward);
}

/// What is to be summed of a unit after this micro-batch.
void GradSync::sum_unit(Context& ctx, int unit) {
  // The queue's work starts after the gradients are computed, and is complete after the sums are.
  const auto post = [&](size_t i, auto work) {
    computed_[i].set(ctx);
    return queue_->post([this, i, work] {
      Context& its = queue_->context();
      computed_[i].await(its);
      work(its);
      synchronize(its);
    });
  };
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const Bucket& b = pieces_[i].of;
    if (b.unit != unit) continue;
    std::vector<Tensor> sources;
    sources.reserve(static_cast<size_t>(counted_sources(b)));
    for (int s = 0; s < sources_of(b); s += source_step(b)) sources.push_back(store_.bucket_grads(b, s));
    if (sharded()) {
      const auto work = [this, i, sources, m = micro_batch_](Context& its) {
        send_shards(its, i, sources, m);
      };
      if (queue_)
        busy(unit) = post(i, work);
      else
        work(ctx);
      continue;
    }
    const Tensor& whole = sources[0];
    if (!in_place()) sum_here(ctx, i, sources);
    if (!last()) continue;
    if (!alone())
      post(i, [this, i, whole](Context& its) { sum_with_ranks(its, i, whole); });
    else if (fixed())
      from_fixed(ctx, whole, fixed_sums(i));
  }
}

/// sum = that of this micro-batch and of those before it that make a whole subtree with it; kept for later if
/// more come.
void GradSync::merge(Context& ctx, const Kept& kept, int row, const Tensor& sum, int64_t micro_batch) {
  const int64_t at = kept.at + row * kept.length;
  size_t level = 0;
  for (int64_t before = micro_batch; before & 1; before >>= 1, ++level)
    add_forward(ctx, sum, levels_[level].rows(at, kept.length), sum);
  if (micro_batch + 1 < micro_batches_) copy(ctx, levels_[level].rows(at, kept.length), sum);
}

/// The fixed-point sums of what is kept of a bucket.
Tensor GradSync::fixed_sums(size_t i) const { return fixed_.rows(kept_[i].fixed_at, kept_[i].length); }

/// x, whose first element is `first` of the bucket, joins its fixed-point sums. An element that is not below
/// the limit, or not finite, is remembered.
void GradSync::add_to_fixed(Context& ctx, size_t i, const Tensor& x, int64_t first, Into into) {
  const double limit =
      kFixedLimit / static_cast<double>(micro_batches_ * mesh_.tokens().size() / equal_ranks());
  add_fixed(ctx, fixed_sums(i), bad_, x, limit, pieces_[i].of.begin + first, into);
}

/// Adds this micro-batch of a bucket to those before it; after the last, their sum is in sources[0] (fixed:
/// in fixed_).
void GradSync::sum_here(Context& ctx, size_t i, const std::vector<Tensor>& sources) {
  for (size_t s = 0; s < sources.size(); ++s) {
    if (fixed())
      add_to_fixed(ctx, i, sources[s], 0, micro_batch_ == 0 && s == 0 ? Into::overwrite : Into::add);
    else
      merge(ctx, kept_[i], static_cast<int>(s), sources[s], micro_batch_);
  }
  if (tree() && last()) add_tree(ctx, sources.data(), sources.size());
}

/// The ranks' sums of a bucket become one, this rank's piece of it in its place; with zero_stage 0 all of it.
void GradSync::sum_with_ranks(Context& ctx, size_t i, const Tensor& whole) {
  const ParamStore::Piece& p = pieces_[i];
  const int64_t ranks = ranks_sharing(p.of);
  const Tensor mine = whole.rows(p.begin - p.of.begin, p.count);
  if (fixed()) {
    const Tensor sums = fixed_sums(i),
                 received = received_.rows(0, ranks * p.count).view({ranks, p.count, 2});
    const Tensor my_sums = sums.rows(p.begin - p.of.begin, p.count);
    if (ranks > 1) {
      ranks_of(p.of).all_to_all(received.data, sums.data, my_sums.bytes());
      sum_fixed_rows(ctx, my_sums, counted_rows(ctx, p.of, received));
    }
    from_fixed(ctx, mine, my_sums);
  } else if (ranks > 1) {
    const Tensor received = received_.rows(0, ranks * p.count).view({ranks, p.count});
    sum_rows(ctx, mine, exchange(ctx, p, received, whole, micro_batches_ - 1), Into::overwrite);
  }
  if (config_.zero_stage == 0) gather(ctx, p, whole, mine);
}

Bf16Wire::Place GradSync::place(const Bucket& b, int64_t micro_batch) const {
  return {.step = step_, .micro_batch = micro_batch, .bucket_begin = b.begin, .rank = mesh_.tokens().rank()};
}

/// received (ranks, count) = this rank's piece of everyone's bucket `all`. Returns the rows that count.
Tensor GradSync::exchange(Context& ctx, const ParamStore::Piece& p, const Tensor& received, const Tensor& all,
                          int64_t micro_batch) {
  Communicator& ranks = ranks_of(p.of);
  if (wire_.allocated() && ranks.size() > 1)
    wire_.all_to_all(ctx, ranks, received, all, place(p.of, micro_batch));
  else
    ranks.all_to_all(received.data, all.data, p.count * dtype_size(all.dtype));
  return counted_rows(ctx, p.of, received);
}

/// Of the rows that the ranks sharing a bucket have sent, those that count, moved to the front of `received`.
Tensor GradSync::counted_rows(Context& ctx, const Bucket& b, const Tensor& received) const {
  const int64_t count = counted_ranks(b), step = rank_step(b);
  for (int64_t r = 1; r < count && step > 1; ++r) copy(ctx, received.rows(r, 1), received.rows(r * step, 1));
  return received.rows(0, count);
}

/// whole = everyone's pieces of the bucket's sum.
void GradSync::gather(Context& ctx, const ParamStore::Piece& p, const Tensor& whole, const Tensor& mine) {
  Communicator& ranks = ranks_of(p.of);
  if (wire_.allocated() && ranks.size() > 1)
    return wire_.all_gather(ctx, ranks, whole, mine, place(p.of, micro_batches_ - 1));
  ranks.all_gather(whole.data, mine.data, mine.bytes());
}

/// One micro-batch of a bucket goes to the owners of its pieces, who add what they get.
void GradSync::send_shards(Context& ctx, size_t i, const std::vector<Tensor>& sources, int64_t micro_batch) {
  const ParamStore::Piece& p = pieces_[i];
  const int64_t all_ranks = ranks_sharing(p.of), num_ranks = counted_ranks(p.of),
                num_sources = static_cast<int64_t>(sources.size());
  // Row r num_sources + s: of source s of rank r, the order of the data axis.
  std::vector<Tensor> rows(static_cast<size_t>(num_ranks * num_sources));
  for (int64_t s = 0; s < num_sources; ++s) {
    const Tensor received = received_.rows(s * all_ranks * p.count, all_ranks * p.count),
                 counted = exchange(ctx, p, received.view({all_ranks, p.count}),
                                    sources[static_cast<size_t>(s)], micro_batch);
    for (int64_t r = 0; r < num_ranks; ++r)
      rows[static_cast<size_t>(r * num_sources + s)] = counted.rows(r, 1).view({p.count});
  }
  const Tensor sum = shards_.rows(p.at, p.count);
  const bool is_last = micro_batch + 1 == micro_batches_;
  if (fixed()) {
    for (size_t row = 0; row < rows.size(); ++row)
      add_to_fixed(ctx, i, rows[row], p.begin - p.of.begin,
                   micro_batch == 0 && row == 0 ? Into::overwrite : Into::add);
    if (is_last) from_fixed(ctx, sum, fixed_sums(i));
    return;
  }
  if (tree())
    for (size_t row = 0; row < rows.size(); ++row)
      merge(ctx, kept_[i], static_cast<int>(row), rows[row], micro_batch);
  if (tree() && !is_last) return;
  if (num_sources == 1)
    return sum_rows(ctx, sum, received_.rows(0, num_ranks * p.count).view({num_ranks, p.count}),
                    tree() ? Into::overwrite : Into::add);
  add_tree(ctx, rows.data(), rows.size());
  copy(ctx, sum, rows[0]);
}

Tensor GradSync::grads(size_t i) const {
  const ParamStore::Piece& p = pieces_[i];
  return sharded() ? shards_.rows(p.at, p.count)
                   : store_.bucket_grads(p.of).rows(p.begin - p.of.begin, p.count);
}

void GradSync::finish(Context& ctx) {
  if (ctx.dry_run) return;
  if (queue_) queue_->wait_all();
  if (!fixed()) return;
  int64_t bad = kNoneBad;
  read_tensor(ctx, &bad, bad_);
  if (bad == kNoneBad) return;
  // The rank that found it makes the sum of squares NaN for all ranks, in the parameter itself if it is on
  // this rank.
  size_t i = 0;
  int64_t at = 0;
  for (size_t k = 0; k < pieces_.size(); ++k)
    if (pieces_[k].begin <= bad && bad < pieces_[k].begin + pieces_[k].count) {
      i = k;
      at = bad - pieces_[k].begin;
    }
  fill(ctx, grads(i).rows(at, 1), std::numeric_limits<double>::quiet_NaN());
}

void GradSync::sum_squares(Context& ctx, Tensor squares) const {
  fill(ctx, bins_, 0.0);
  for (size_t i = 0; i < pieces_.size(); ++i) add_squares(ctx, bins_, grads(i));
  if (ctx.dry_run) return;
  std::array<double, kSquareBins> bins;
  read_tensor(ctx, bins.data(), bins_);
  all_reduce(mesh_.tokens(), bins.data(), kSquareBins);
  const double total = squares_of_bins(bins.data());
  write_tensor(ctx, squares, &total);
}

}  // namespace sluice
