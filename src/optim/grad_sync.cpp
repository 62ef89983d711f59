#include "optim/grad_sync.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <utility>

#include "comm/reduce.h"
#include "core/parallel_for.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"

namespace sluice {
namespace {

constexpr double kFixedOne = 1125899906842624.0;  // 2^50: the last bit of a fixed-point gradient is 2^-50
constexpr double kFixedLimit = 4096.0;            // what the sum of a step stays below

template <class T>
void from_fixed(T* x, const int64_t* sum, int64_t n) {
  parallel_for(n, 16384, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x[i] = static_cast<T>(static_cast<double>(sum[i]) / kFixedOne);
  });
}

/// a = left + right.
template <class T>
void add_pair(T* a, const T* left, const T* right, int64_t n) {
  parallel_for(n, 16384, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) a[i] = left[i] + right[i];
  });
}

template <class T>
void copy_elements(T* to, const T* from, int64_t n) {
  parallel_for(n, 16384, [=](int64_t begin, int64_t end) { std::copy(from + begin, from + end, to + begin); });
}

}  // namespace

GradSync::GradSync(const ParallelConfig& config, ParamStore& store, const Mesh& mesh, const Mesh& moves, CommQueue* queue)
    : config_(config), store_(store), mesh_(mesh), moves_(moves), queue_(queue) {
  SLUICE_CHECK(queue || mesh.data().size() == 1, "GradSync: several ranks need a queue");
}

template <class F>
void GradSync::with_type(F&& f) {
  if (accumulate_dtype(store_.dtype()) == DType::f64) f(double{});
  else f(float{});
}

void GradSync::allocate(Arena& arena, int64_t micro_batches) {
  SLUICE_CHECK(arena.device() == Device::cpu || !exact(), "GradSync: exact on a GPU");
  micro_batches_ = micro_batches;
  pieces_ = store_.pieces(mesh_.data().rank(), mesh_.expert_data().rank());
  const DType wide = accumulate_dtype(store_.dtype());
  kept_.clear();
  int64_t at = 0, fixed_at = 0, largest = 0;
  for (const ParamStore::Piece& p : pieces_) {
    const int64_t length = p.of.end - p.of.begin;
    Kept kept{.rows = sources_of(p.of), .length = length, .at = at, .fixed_at = fixed_at};
    if (sharded()) {
      kept.rows *= ranks_sharing(p.of);
      kept.length = p.count;
    }
    at += kept.rows * kept.length;
    fixed_at += kept.length;
    largest = std::max(largest, length * (sharded() ? sources_of(p.of) : 1));
    kept_.push_back(kept);
  }
  computed_.clear();
  computed_.resize(pieces_.size());
  levels_.clear();
  if (tree() && !in_place())
    for (int64_t m = 1; m < micro_batches; m *= 2) levels_.push_back(arena.alloc("gradient tree", wide, {at}));
  fixed_ = fixed() ? arena.alloc("fixed-point gradients", DType::i32, {fixed_at, 2}) : Tensor();
  shards_ = sharded() ? arena.alloc("gradient shards", wide, {ParamStore::size_of(pieces_)}) : Tensor();
  received_ = Tensor();
  if (!alone() || sharded())
    received_ = fixed() && !sharded() ? arena.alloc("gradients of other ranks", DType::i32, {largest, 2})
                                      : arena.alloc("gradients of other ranks", wide, {largest});
  if (!alone() && config_.gradient_dtype == GradientDtype::bf16) wire_.allocate(arena, largest);
  bins_ = arena.alloc("square bins", DType::f64, {kSquareBins});
}

void GradSync::begin_step(Context& ctx, int64_t step) {
  bad_ = kNoneBad;
  step_ = step;
  if (in_place()) store_.zero_grads(ctx);
  if (ctx.dry_run) return;
  if (fixed()) std::fill_n(static_cast<int64_t*>(fixed_.data), fixed_.dim(0), 0);
  if (sharded()) fill(ctx, shards_, 0.0);
}

/// The unit's gradients, of all sources, are zero.
void GradSync::zero(Context& ctx, int unit) {
  if (ctx.dry_run) return;
  for (const ParamStore::Piece& p : pieces_)
    if (p.of.unit == unit)
      for (int s = 0; s < sources_of(p.of); ++s) fill(ctx, store_.bucket_grads(p.of, s), 0.0);
}

void GradSync::begin_micro_batch(Context& ctx, int64_t i) {
  micro_batch_ = i;
  if (!in_place()) begin(ctx, 0, Pass::backward);
}

void GradSync::begin(Context& ctx, int unit, Pass pass) {
  if (pass == Pass::forward || in_place()) return;
  if (sharded()) {
    if (queue_) queue_->wait(busy(unit));  // what was there is with its owners
    store_.place_grads(unit);
  }
  zero(ctx, unit);
}

void GradSync::end(Context& ctx, int unit, Pass pass) {
  if (pass == Pass::forward || ctx.dry_run) return;
  if (in_place() && (alone() || !last())) return;
  sum_unit(ctx, unit);
}

void GradSync::end_micro_batch(Context& ctx) { end(ctx, 0, Pass::backward); }

/// What is to be summed of a unit after this micro-batch.
void GradSync::sum_unit(Context& ctx, int unit) {
  // The queue's work begins when the gradients are computed, and is done when its sums are.
  const auto post = [&](size_t i, auto work) {
    computed_[i].set(ctx);
    return queue_->post([this, i, work] {
      Context& its = queue_->context();
      computed_[i].await(its);
      work(its);
      synchronize(its);
    });
  };
  with_type([&](auto tag) {
    using T = decltype(tag);
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const Bucket& b = pieces_[i].of;
      if (b.unit != unit) continue;
      if (sharded()) {
        std::vector<Tensor> sources;
        for (int s = 0; s < sources_of(b); ++s) sources.push_back(store_.bucket_grads(b, s));
        const auto work = [this, i, sources, m = micro_batch_](Context& its) { send_shards<T>(its, i, sources, m); };
        if (queue_) busy(unit) = post(i, work);
        else work(ctx);
        continue;
      }
      const Tensor whole = store_.bucket_grads(b);
      if (!in_place()) sum_here(i, whole.as<T>());
      if (!last()) continue;
      if (alone()) {
        if (fixed()) from_fixed(whole.as<T>(), static_cast<int64_t*>(fixed_.data) + kept_[i].fixed_at, b.end - b.begin);
        continue;
      }
      post(i, [this, i, whole](Context& its) { sum_with_ranks<T>(its, i, whole); });
    }
  });
}

/// sum = that of this micro-batch and of those before it that make a whole subtree with it; kept for later if more come.
template <class T>
void GradSync::merge(const Kept& kept, int row, T* sum, int64_t micro_batch) {
  const int64_t at = kept.at + row * kept.length;
  size_t level = 0;
  for (int64_t before = micro_batch; before & 1; before >>= 1, ++level)
    add_pair(sum, levels_[level].as<T>() + at, sum, kept.length);
  if (micro_batch + 1 < micro_batches_) copy_elements(levels_[level].as<T>() + at, sum, kept.length);
}

/// sum += x, whose first element is `first` of the bucket; an element that is not below the limit, or not finite, is left out
/// and remembered.
template <class T>
void GradSync::add_fixed(const Bucket& b, int64_t* sum, const T* x, int64_t n, int64_t first) {
  const double limit = kFixedLimit / static_cast<double>(micro_batches_ * mesh_.data().size());
  std::atomic<int64_t> bad{bad_};
  parallel_for(n, 16384, [&](int64_t begin, int64_t end) {
    int64_t mine = kNoneBad;
    for (int64_t i = begin; i < end; ++i) {
      const double v = static_cast<double>(x[i]);
      if (std::abs(v) < limit) sum[i] += static_cast<int64_t>(std::llrint(v * kFixedOne));
      else mine = std::min(mine, b.begin + first + i);
    }
    for (int64_t now = bad; mine < now && !bad.compare_exchange_weak(now, mine);) {
    }
  });
  bad_ = bad;
}

/// Adds this micro-batch of a bucket to those before it; after the last, their sum is in `whole` (fixed: in fixed_).
template <class T>
void GradSync::sum_here(size_t i, T* whole) {
  const Bucket& b = pieces_[i].of;
  const int64_t n = b.end - b.begin;
  std::vector<T*> rows;
  for (int s = 0; s < sources_of(b); ++s) {
    T* row = s == 0 ? whole : store_.bucket_grads(b, s).template as<T>();
    if (fixed()) add_fixed(b, static_cast<int64_t*>(fixed_.data) + kept_[i].fixed_at, row, n, 0);
    else merge(kept_[i], s, row, micro_batch_);
    rows.push_back(row);
  }
  if (tree() && last()) tree_sum(rows.data(), static_cast<int>(rows.size()), n);
}

/// The ranks' sums of a bucket become one, this rank's piece of it in its place; with zero_stage 0 all of it.
template <class T>
void GradSync::sum_with_ranks(Context& ctx, size_t i, const Tensor& whole) {
  const ParamStore::Piece& p = pieces_[i];
  const int64_t ranks = ranks_sharing(p.of);
  const Tensor mine = whole.rows(p.begin - p.of.begin, p.count);
  if (fixed()) {
    int64_t* sums = static_cast<int64_t*>(fixed_.data) + kept_[i].fixed_at;
    int64_t* my_sums = sums + (p.begin - p.of.begin);
    reduce_scatter(ranks_of(p.of), my_sums, sums, p.count, static_cast<int64_t*>(received_.data));
    from_fixed(mine.as<T>(), my_sums, p.count);
  } else if (ranks > 1) {
    const Tensor received = received_.rows(0, ranks * p.count).view({ranks, p.count});
    exchange(ctx, p, received, whole, micro_batches_ - 1);
    sum_rows(ctx, mine, received, Into::overwrite);
  }
  if (config_.zero_stage == 0) gather(ctx, p, whole, mine);
}

Bf16Wire::Place GradSync::place(const Bucket& b, int64_t micro_batch) const {
  return {.step = step_, .micro_batch = micro_batch, .bucket_begin = b.begin, .rank = mesh_.data().rank()};
}

/// received (ranks, count) = this rank's piece of everyone's bucket `all`.
void GradSync::exchange(Context& ctx, const ParamStore::Piece& p, const Tensor& received, const Tensor& all, int64_t micro_batch) {
  Communicator& ranks = ranks_of(p.of);
  if (wire_.allocated() && ranks.size() > 1) return wire_.all_to_all(ctx, ranks, received, all, place(p.of, micro_batch));
  ranks.all_to_all(received.data, all.data, p.count * dtype_size(all.dtype));
}

/// whole = everyone's pieces of the bucket's sum.
void GradSync::gather(Context& ctx, const ParamStore::Piece& p, const Tensor& whole, const Tensor& mine) {
  Communicator& ranks = ranks_of(p.of);
  if (wire_.allocated() && ranks.size() > 1) return wire_.all_gather(ctx, ranks, whole, mine, place(p.of, micro_batches_ - 1));
  ranks.all_gather(whole.data, mine.data, mine.bytes());
}

/// One micro-batch of a bucket goes to the owners of its pieces, who add what they get.
template <class T>
void GradSync::send_shards(Context& ctx, size_t i, const std::vector<Tensor>& sources, int64_t micro_batch) {
  const ParamStore::Piece& p = pieces_[i];
  const int num_ranks = ranks_sharing(p.of), num_sources = static_cast<int>(sources.size());
  // Row r num_sources + s: of source s of rank r, the order of the data axis.
  std::vector<T*> rows(static_cast<size_t>(num_ranks * num_sources));
  for (int s = 0; s < num_sources; ++s) {
    const Tensor received = received_.rows(s * num_ranks * p.count, num_ranks * p.count);
    exchange(ctx, p, received, sources[static_cast<size_t>(s)], micro_batch);
    for (int r = 0; r < num_ranks; ++r) rows[static_cast<size_t>(r * num_sources + s)] = received.as<T>() + r * p.count;
  }
  if (!exact())
    return sum_rows(ctx, shards_.rows(p.at, p.count), received_.rows(0, num_ranks * p.count).view({num_ranks, p.count}), Into::add);
  T* sum = shards_.as<T>() + p.at;
  const bool is_last = micro_batch + 1 == micro_batches_;
  if (fixed()) {
    int64_t* sums = static_cast<int64_t*>(fixed_.data) + kept_[i].fixed_at;
    for (const T* row : rows) add_fixed(p.of, sums, row, p.count, p.begin - p.of.begin);
    if (is_last) from_fixed(sum, sums, p.count);
    return;
  }
  for (size_t row = 0; row < rows.size(); ++row) merge(kept_[i], static_cast<int>(row), rows[row], micro_batch);
  if (!is_last) return;
  tree_sum(rows.data(), static_cast<int>(rows.size()), p.count);
  copy_elements(sum, rows[0], p.count);
}

Tensor GradSync::grads(size_t i) const {
  const ParamStore::Piece& p = pieces_[i];
  return sharded() ? shards_.rows(p.at, p.count) : store_.bucket_grads(p.of).rows(p.begin - p.of.begin, p.count);
}

void GradSync::finish(Context& ctx) {
  if (ctx.dry_run) return;
  if (queue_) queue_->wait_all();
  if (bad_ == kNoneBad) return;
  // Whoever found it makes the sum of squares NaN for all: in the parameter itself, where that is here.
  size_t i = 0;
  int64_t at = 0;
  for (size_t k = 0; k < pieces_.size(); ++k)
    if (pieces_[k].begin <= bad_ && bad_ < pieces_[k].begin + pieces_[k].count) {
      i = k;
      at = bad_ - pieces_[k].begin;
    }
  with_type([&](auto tag) {
    using T = decltype(tag);
    grads(i).template as<T>()[at] = std::numeric_limits<T>::quiet_NaN();
  });
}

void GradSync::sum_squares(Context& ctx, Tensor squares) const {
  fill(ctx, bins_, 0.0);
  for (size_t i = 0; i < pieces_.size(); ++i) add_squares(ctx, bins_, grads(i));
  if (ctx.dry_run) return;
  std::array<double, kSquareBins> bins;
  read_tensor(ctx, bins.data(), bins_);
  all_reduce(mesh_.data(), bins.data(), kSquareBins);
  const double total = squares_of_bins(bins.data());
  write_tensor(ctx, squares, &total);
}

}  // namespace sluice
