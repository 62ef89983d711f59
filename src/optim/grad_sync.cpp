#include "optim/grad_sync.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

#include "comm/reduce.h"
#include "core/parallel_for.h"
#include "ops/elementwise.h"

namespace sluice {
namespace {

constexpr double kFixedOne = 1125899906842624.0;  // 2^50: the last bit of a fixed-point gradient is 2^-50
constexpr double kFixedLimit = 4096.0;            // what the sum of a step stays below

/// sum += x; the first element that is not below the limit, or not finite, and is left out: `bad`, if it is earlier.
template <class T>
void add_fixed(int64_t* sum, const T* x, int64_t n, double limit, int64_t& bad) {
  std::atomic<int64_t> first{bad};
  parallel_for(n, 16384, [&, limit](int64_t begin, int64_t end) {
    int64_t mine = std::numeric_limits<int64_t>::max();
    for (int64_t i = begin; i < end; ++i) {
      const double v = static_cast<double>(x[i]);
      if (std::abs(v) < limit) sum[i] += static_cast<int64_t>(std::llrint(v * kFixedOne));
      else mine = std::min(mine, i);
    }
    for (int64_t now = first; mine < now && !first.compare_exchange_weak(now, mine);) {
    }
  });
  bad = first;
}

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

}  // namespace

int64_t padded_size(int64_t elements, int ranks) {
  const int64_t multiple = int64_t{32} * ranks;
  return (elements + multiple - 1) / multiple * multiple;
}

void GradSync::allocate(Arena& arena, int64_t micro_batches) {
  const Tensor& grads = store_.flat_grads();
  const int64_t n = grads.numel();
  micro_batches_ = micro_batches;
  levels_.clear();
  if (!in_place() && !fixed())
    for (int64_t m = micro_batches; m > 0; m /= 2) levels_.push_back(arena.alloc("gradient tree", grads.dtype, {n}));
  if (fixed()) fixed_ = arena.alloc("fixed-point gradients", DType::i32, {n, 2});
  if (ranks_.size() > 1)
    received_ = fixed() ? arena.alloc("gradients of other ranks", DType::i32, {n, 2})
                        : arena.alloc("gradients of other ranks", grads.dtype, {n});
}

void GradSync::begin(Context& ctx) {
  done_ = 0;
  bad_ = kNoneBad;
  store_.zero_grads(ctx);
  if (fixed() && !ctx.dry_run) std::fill_n(static_cast<int64_t*>(fixed_.data), fixed_.dim(0), 0);
}

template <class T>
void GradSync::push() {
  const int64_t n = store_.flat_grads().numel();
  T* grads = store_.flat_grads().as<T>();
  if (fixed()) {
    add_fixed(static_cast<int64_t*>(fixed_.data), grads, n, kFixedLimit / static_cast<double>(micro_batches_ * ranks_.size()), bad_);
    return;
  }
  // A binary counter: two sums of 2^k micro-batches become one of 2^(k + 1), the earlier one on the left.
  size_t level = 0;
  for (int64_t before = done_; before & 1; before >>= 1, ++level) add_pair(grads, levels_[level].as<T>(), grads, n);
  parallel_for(n, 16384, [to = levels_[level].as<T>(), grads](int64_t begin, int64_t end) {
    std::copy(grads + begin, grads + end, to + begin);
  });
}

void GradSync::micro_batch_done(Context& ctx) {
  if (in_place()) return;
  if (!ctx.dry_run) {
    if (store_.flat_grads().dtype == DType::f64) push<double>();
    else push<float>();
  }
  ++done_;
  store_.zero_grads(ctx);
}

template <class T>
void GradSync::sum_over_ranks(T* whole) {
  if (ranks_.size() == 1) return;
  const int64_t n = store_.flat_grads().numel(), part = n / ranks_.size();
  T* mine = whole + ranks_.rank() * part;
  reduce_scatter(ranks_, mine, whole, part, static_cast<T*>(received_.data));
  ranks_.all_gather(whole, mine, part * static_cast<int64_t>(sizeof(T)));
}

void GradSync::finish(Context& ctx) {
  if (ctx.dry_run) return;
  const Tensor& grads = store_.flat_grads();
  const int64_t n = grads.numel();
  const auto with_type = [&](auto&& f) {
    if (grads.dtype == DType::f64) f(grads.as<double>());
    else f(grads.as<float>());
  };
  if (fixed()) {
    sum_over_ranks(static_cast<int64_t*>(fixed_.data));
    std::vector<int64_t> bad(static_cast<size_t>(ranks_.size()));
    ranks_.all_gather(bad.data(), &bad_, sizeof(int64_t));
    with_type([&](auto* g) {
      from_fixed(g, static_cast<const int64_t*>(fixed_.data), n);
      for (const int64_t i : bad)
        if (i != kNoneBad) g[i] = std::numeric_limits<std::remove_reference_t<decltype(*g)>>::quiet_NaN();
    });
    return;
  }
  with_type([&](auto* g) {
    using T = std::remove_pointer_t<decltype(g)>;
    if (!in_place()) {
      // What is left of the counter, the earliest on the left.
      bool any = false;
      for (size_t level = 0; level < levels_.size(); ++level) {
        if (((done_ >> level) & 1) == 0) continue;
        const T* sum = levels_[level].template as<T>();
        if (any) add_pair(g, sum, g, n);
        else std::copy(sum, sum + n, g);
        any = true;
      }
    }
    sum_over_ranks(g);
  });
}

}  // namespace sluice
