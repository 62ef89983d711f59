// Rows are processed in chunks, because not all logits shall exist at once. The softmax finds a chunk's
// logits in the outer cache and works one row at a time, so that only its first pass misses the inner ones. A
// chunk reads and writes dW once: where gradients have a smaller type than logits, it is larger, and its
// logits are computed in parts. The three matrix products dominate the time.
#include "ops/cross_entropy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"
#include "core/targets.h"
#include "ops/elementwise.h"
#include "ops/matmul.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/convert.h"
#include "ops/cpu/soft_cap.h"

namespace {

using Layout = Product::Layout;

/// Logits that are computed at a time, and the rows that they have at least.
constexpr int64_t kLogitBytes = 16 << 20, kLogitRows = 128;
/// The same where gradients have a smaller type, and a chunk of such gradients.
constexpr int64_t kPartBytes = 4 << 20, kPartRows = 64, kChunkBytes = 64 << 20, kChunkRows = 128;

/// Rows that fit `bytes`, in multiples of 64 but at least `least`, and at most `rows`.
int64_t fitting_rows(int64_t rows, int64_t vocabulary, DType type, int64_t bytes, int64_t least) {
  return std::min(rows, std::max(bytes / (vocabulary * dtype_size(type)) / 64 * 64, least));
}

void check_targets(const char* op, const Tensor& targets, int64_t vocabulary) {
  const int32_t* t = targets.as<int32_t>();
  for (int64_t i = 0; i < targets.numel(); ++i)
    if (t[i] < kPadding || t[i] >= vocabulary)
      fail(ExitCode::data,
           "{}: target {} at row {} is outside the vocabulary of {} words (-1 and -2 mean no loss)", op, t[i],
           i, vocabulary);
}

/// Partial results of independent lanes, so that a row's max and sum vectorise; combined in a deterministic
/// order.
constexpr int64_t kLanes = 32;

template <class A>
A row_max(const A* x, int64_t n) {
  std::array<A, kLanes> lane;
  lane.fill(-std::numeric_limits<A>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l)
      lane[static_cast<size_t>(l)] = std::max(lane[static_cast<size_t>(l)], x[i + l]);
  A m = lane[0];
  for (A y : lane) m = std::max(m, y);
  for (; i < n; ++i) m = std::max(m, x[i]);
  return m;
}

/// sum exp(x - m); x becomes exp(x - m) where kKeep.
template <bool kKeep, class A>
A exp_sum(A* x, int64_t n, A m) {
  std::array<A, kLanes> lane{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) {
      const A e = exp_fast(x[i + l] - m);
      lane[static_cast<size_t>(l)] += e;
      if constexpr (kKeep) x[i + l] = e;
    }
  A s = 0;
  for (; i < n; ++i) {
    const A e = exp_fast(x[i] - m);
    s += e;
    if constexpr (kKeep) x[i] = e;
  }
  for (A y : lane) s += y;
  return s;
}

/// The z-loss of a chunk's rows.
template <class A>
struct RowsZLoss {
  A coefficient;
  A* squares;  // may be null

  RowsZLoss from(int64_t row) const { return {coefficient, squares ? squares + row : nullptr}; }
  void put(int64_t row, A lse) const {
    if (squares) squares[row] = lse * lse;
  }
  /// What it multiplies the probabilities of a row by in the gradient: 1 where the coefficient is 0.
  A factor(A lse) const { return A(1) + 2 * coefficient * lse; }
};

/// The log-sum-exp of a row, and its loss.
template <class A>
struct RowLoss {
  A lse, loss;
};

/// A row of logits under a soft cap. The cap's slope needs the capped logits, so exp is taken twice.
template <bool kGradient, class A, class S>
RowLoss<A> capped_row(S* d, A* x, int64_t target, int64_t n, A scale, A cap, const RowsZLoss<A>& z) {
  const A inverse = A(1) / cap;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] = soft_cap(x[i], cap, inverse);
  const A m = row_max(x, n), x_target = x[target], sum = exp_sum<false>(x, n, m), log_sum = std::log(sum);
  if constexpr (kGradient) {
    const auto slope = [=](A y) { return A(1) - y * inverse * (y * inverse); };
    const A factor = scale / sum * z.factor(log_sum + m),
            at_target = (exp_fast(x_target - m) * factor - scale) * slope(x_target);
    for (int64_t i = 0; i < n; ++i) store(d + i, exp_fast(x[i] - m) * factor * slope(x[i]));
    store(d + target, at_target);
  }
  return {log_sum + m, log_sum - (x_target - m)};
}

/// A row of logits as they are.
template <bool kGradient, class A, class S>
RowLoss<A> plain_row(S* d, A* x, int64_t target, int64_t n, A scale, const RowsZLoss<A>& z) {
  const A m = row_max(x, n), x_target = x[target], sum = exp_sum<kGradient>(x, n, m), log_sum = std::log(sum);
  if constexpr (kGradient) {
    const A factor = scale / sum * z.factor(log_sum + m), at_target = x[target] * factor - scale;
    for (int64_t i = 0; i < n; ++i) store(d + i, x[i] * factor);
    store(d + target, at_target);
  }
  return {log_sum + m, log_sum - (x_target - m)};
}

/// Losses of a chunk; with kGradient the logits become their gradient, stored as S in dlogits, which may be
/// the logits themselves.
template <bool kGradient, class A, class S>
void softmax_rows(A* losses, S* dlogits, A* logits, const int32_t* targets, int64_t rows, int64_t vocabulary,
                  A scale, A cap, const RowsZLoss<A>& z) {
  parallel_for(rows, 1, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      A* x = logits + row * vocabulary;
      S* d = dlogits + row * vocabulary;
      const int32_t target = targets[row];
      if (target < 0) {
        losses[row] = 0;
        z.put(row, 0);
        if constexpr (kGradient) std::fill_n(d, vocabulary, S(0));
        continue;
      }
      const RowLoss<A> result = cap > 0 ? capped_row<kGradient>(d, x, target, vocabulary, scale, cap, z)
                                        : plain_row<kGradient>(d, x, target, vocabulary, scale, z);
      losses[row] = result.loss;
      z.put(row, result.lse);
    }
  });
}

/// S: storage of hidden and head. Products run in P = product_dtype(S); logits are A.
template <bool kGradient, class S, class P>
void run(Context& ctx, const char* op, const Tensor& losses, const Tensor& dhidden, const Tensor& dweight,
         const Tensor& hidden, const LinearWeight& head, const Tensor& targets, double gradient_scale,
         double cap, const LogitZLoss& z, Into into_dweight) {
  using A = accumulate_t<S>;
  constexpr bool kWidens = !std::is_same_v<S, P>;
  constexpr DType kProduct = dtype_of<P>::value, kAccumulate = dtype_of<A>::value;
  const int64_t rows = hidden.dim(0), width = hidden.dim(1), vocabulary = head.value.dim(0);
  if (rows == 0) {
    if (dweight && into_dweight == Into::overwrite) fill(ctx, dweight, 0);
    return;
  }
  // Gradients of the type of the logits take their place.
  constexpr bool kNarrows = kGradient && !std::is_same_v<P, A>, kInPlace = kGradient && !kNarrows;
  const int64_t part = kNarrows ? fitting_rows(rows, vocabulary, kAccumulate, kPartBytes, kPartRows)
                                : fitting_rows(rows, vocabulary, kAccumulate, kLogitBytes, kLogitRows),
                chunk = kNarrows ? fitting_rows(rows, vocabulary, kProduct, kChunkBytes, kChunkRows) : part;

  ScratchScope t(ctx.scratch);
  Tensor logits, dlogits, wide_hidden, wide_dhidden, wide_head;
  if constexpr (!kInPlace) logits = t.alloc("logits", kAccumulate, {part, vocabulary});
  if constexpr (kGradient) dlogits = t.alloc("dlogits", kProduct, {chunk, vocabulary});
  if constexpr (kWidens) {
    wide_hidden = t.alloc("hidden in f32", kProduct, {chunk, width});
    if constexpr (kGradient) wide_dhidden = t.alloc("dhidden in f32", kProduct, {chunk, width});
    if (!head.packed || (kGradient && !head.packed_transposed)) {
      wide_head = t.alloc("head in f32", kProduct, {vocabulary, width});
      if (!ctx.dry_run) widen(wide_head.as<float>(), head.value.as<bf16>(), head.value.numel());
    }
  }
  if (!ctx.dry_run) check_targets(op, targets, vocabulary);
  const RowsZLoss<A> rows_z{static_cast<A>(z.coefficient), z.squares ? z.squares.as<A>() : nullptr};
  const void* plain_head = kWidens ? wide_head.data : head.value.data;

  for (int64_t row = 0; row < rows; row += chunk) {
    const int64_t count = std::min(chunk, rows - row);
    const Tensor x = kWidens ? wide_hidden.rows(0, count) : hidden.rows(row, count);
    if constexpr (kWidens)
      if (!ctx.dry_run) widen(x.as<float>(), hidden.as<bf16>() + row * width, count * width);
    for (int64_t at = 0; at < count; at += part) {
      const int64_t n = std::min(part, count - at), first = row + at;
      const Tensor d = kGradient ? dlogits.rows(at, n) : Tensor(), l = kInPlace ? d : logits.rows(0, n);
      multiply(ctx,
               {kProduct, kAccumulate, n, vocabulary, width, false,
                head.packed ? Layout::packed : Layout::transposed},
               x.rows(at, n).data, head.packed ? head.packed.data : plain_head, l.data);
      if (!ctx.dry_run)
        softmax_rows<kGradient>(losses.as<A>() + first, static_cast<P*>(d.data), l.as<A>(),
                                targets.as<int32_t>() + first, n, vocabulary, static_cast<A>(gradient_scale),
                                static_cast<A>(cap), rows_z.from(first));
    }
    if constexpr (kGradient) {
      void* dx = kWidens ? wide_dhidden.data : dhidden.rows(row, count).data;
      multiply(ctx,
               {kProduct, kProduct, count, width, vocabulary, false,
                head.packed_transposed ? Layout::packed : Layout::plain},
               dlogits.data, head.packed_transposed ? head.packed_transposed.data : plain_head, dx);
      if constexpr (kWidens)
        if (!ctx.dry_run)
          narrow(dhidden.as<bf16>() + row * width, wide_dhidden.as<float>(), count * width, Into::overwrite);
      if (dweight)
        multiply(ctx,
                 {kProduct, kAccumulate, vocabulary, width, count, true, Layout::plain,
                  into_dweight == Into::add || row > 0},
                 dlogits.data, x.data, dweight.data);
    }
  }
}

template <bool kGradient>
void run_any(Context& ctx, const char* op, const Tensor& losses, const Tensor& dhidden, const Tensor& dweight,
             const Tensor& hidden, const LinearWeight& head, const Tensor& targets, double gradient_scale,
             double cap, const LogitZLoss& z, Into into_dweight) {
  const auto go = hidden.dtype == DType::f64                  ? run<kGradient, double, double>
                  : hidden.dtype == DType::f32                ? run<kGradient, float, float>
                  : product_dtype(DType::bf16) == DType::bf16 ? run<kGradient, bf16, bf16>
                                                              : run<kGradient, bf16, float>;
  go(ctx, op, losses, dhidden, dweight, hidden, head, targets, gradient_scale, cap, z, into_dweight);
}

}  // namespace

void cross_entropy_forward(Context& ctx, Tensor losses, const Tensor& hidden, const LinearWeight& head,
                           const Tensor& targets, double soft_cap) {
  run_any<false>(ctx, "cross_entropy_forward", losses, {}, {}, hidden, head, targets, 0, soft_cap, {},
                 Into::add);
}

void cross_entropy_forward_backward(Context& ctx, Tensor losses, Tensor dhidden, Tensor dweight,
                                    const Tensor& hidden, const LinearWeight& head, const Tensor& targets,
                                    const Tensor& gradient_scale, double soft_cap, const LogitZLoss& z,
                                    Into into_dweight) {
  run_any<true>(ctx, "cross_entropy_forward_backward", losses, dhidden, dweight, hidden, head, targets,
                ctx.dry_run ? 0 : *gradient_scale.as<double>(), soft_cap, z, into_dweight);
}

#include "ops/cpu/isa_end.h"
