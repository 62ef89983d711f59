// Bound by memory: each pass reads the heads once. Sums over tokens go by rows of the extra key, in f64 and
// in the order of tokens, so that bits do not depend on the number of threads.
#include "ops/extra_key.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

namespace {

constexpr int64_t kTokens = 32;  // per task at least

/// f(token, head, index into (T, H, D), index into (H, T)) for every row, by threads over tokens.
template <class F>
void for_each_row(const Tensor& x, const F& f) {
  const int64_t tokens = x.dim(0), heads = x.dim(1), depth = x.dim(2);
  parallel_for(tokens, kTokens, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h) f(h, (t * heads + h) * depth, h * tokens + t);
  });
}

/// sums (Hx, D) += sum over tokens, and heads of the row, of weight(index into (H, T)) x.
template <class T, class F>
void add_weighted(const Tensor& sums, const Tensor& scratch, const Tensor& x, const F& weight) {
  using A = accumulate_t<T>;
  const int64_t tokens = x.dim(0), heads = x.dim(1), depth = x.dim(2), rows = sums.numel() / depth,
                group = heads / rows;
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      double* const sum = scratch.as<double>() + r * depth;
      std::fill_n(sum, depth, 0.0);
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t h = r * group; h < (r + 1) * group; ++h) {
          const T* const in = x.as<T>() + (t * heads + h) * depth;
          const double w = static_cast<double>(weight(h * tokens + t));
          for (int64_t d = 0; d < depth; ++d) sum[d] += w * static_cast<double>(load(in + d));
        }
      for (int64_t d = 0; d < depth; ++d) sums.as<A>()[r * depth + d] += static_cast<A>(sum[d]);
    }
  });
}

/// The row of head h, or null.
template <class T>
const T* row_of(const Tensor& rows, int64_t h, int64_t heads) {
  return rows ? rows.as<T>() + h / (heads / rows.dim(0)) * rows.dim(1) : nullptr;
}

template <class T>
void logits_t(const Tensor& logits, const Tensor& q, const Tensor& key, double scale) {
  using A = accumulate_t<T>;
  const int64_t depth = q.dim(2);
  for_each_row(q, [&](int64_t h, int64_t at, int64_t i) {
    const T *in = q.as<T>() + at, *k = row_of<T>(key, h, q.dim(1));
    A sum = 0;
    for (int64_t d = 0; d < depth; ++d) sum += load(in + d) * load(k + d);
    logits.as<A>()[i] = static_cast<A>(scale) * sum;
  });
}

template <class T>
void forward_t(const Tensor& y, const Tensor& o, const Tensor& lse, const ExtraKey& extra) {
  using A = accumulate_t<T>;
  const int64_t depth = o.dim(2);
  const A *l = lse.as<A>(), *x = extra.logits.as<A>();
  for_each_row(o, [&](int64_t h, int64_t at, int64_t i) {
    const A share = sigmoid(l[i] - x[i]), rest = sigmoid(x[i] - l[i]);
    const T* const v = row_of<T>(extra.value, h, o.dim(1));
    for (int64_t d = 0; d < depth; ++d)
      store(y.as<T>() + at + d, share * load(o.as<T>() + at + d) + (v ? rest * load(v + d) : A(0)));
  });
}

template <class T>
void backward_t(const Tensor& d_o, const Tensor& dlse, const Tensor& dvalue, const Tensor& scratch,
                const Tensor& dy, const Tensor& o, const Tensor& lse, const ExtraKey& extra) {
  using A = accumulate_t<T>;
  const int64_t depth = o.dim(2);
  const A *l = lse.as<A>(), *x = extra.logits.as<A>();
  // Before d_o, which may alias dy.
  if (extra.value) add_weighted<T>(dvalue, scratch, dy, [&](int64_t i) { return sigmoid(x[i] - l[i]); });
  for_each_row(o, [&](int64_t h, int64_t at, int64_t i) {
    const A share = sigmoid(l[i] - x[i]), rest = sigmoid(x[i] - l[i]);
    const T* const v = row_of<T>(extra.value, h, o.dim(1));
    A sum = 0;
    for (int64_t d = 0; d < depth; ++d) {
      const A dy_d = load(dy.as<T>() + at + d);
      sum += dy_d * (load(o.as<T>() + at + d) - (v ? load(v + d) : A(0)));
      store(d_o.as<T>() + at + d, share * dy_d);
    }
    dlse.as<A>()[i] = share * rest * sum;
  });
}

template <class T>
void logits_backward_t(const Tensor& dq, const Tensor& dkey, const Tensor& scratch, const Tensor& dlse,
                       const Tensor& q, const Tensor& key, double scale) {
  using A = accumulate_t<T>;
  const int64_t depth = q.dim(2);
  const A factor = -static_cast<A>(scale), *dl = dlse.as<A>();
  for_each_row(q, [&](int64_t h, int64_t at, int64_t i) {
    const T* const k = row_of<T>(key, h, q.dim(1));
    T* const out = dq.as<T>() + at;
    for (int64_t d = 0; d < depth; ++d) store(out + d, load(out + d) + factor * dl[i] * load(k + d));
  });
  add_weighted<T>(dkey, scratch, q, [&](int64_t i) { return factor * dl[i]; });
}

}  // namespace

void extra_key_logits(Context& ctx, Tensor logits, const Tensor& q, const Tensor& key, double scale) {
  if (ctx.dry_run) return;
  with_storage_type(q.dtype, [&](auto t) { logits_t<decltype(t)>(logits, q, key, scale); });
}

void extra_key_forward(Context& ctx, Tensor y, const Tensor& o, const Tensor& lse, const ExtraKey& extra) {
  if (ctx.dry_run) return;
  with_storage_type(o.dtype, [&](auto t) { forward_t<decltype(t)>(y, o, lse, extra); });
}

void extra_key_backward(Context& ctx, Tensor d_o, Tensor dlse, Tensor dvalue, const Tensor& dy,
                        const Tensor& o, const Tensor& lse, const ExtraKey& extra) {
  ScratchScope temporaries(ctx.scratch);
  const Tensor sums =
      temporaries.alloc("extra_key.dvalue", DType::f64, {extra.value ? extra.value.numel() : 0});
  if (ctx.dry_run) return;
  with_storage_type(o.dtype,
                    [&](auto t) { backward_t<decltype(t)>(d_o, dlse, dvalue, sums, dy, o, lse, extra); });
}

void extra_key_logits_backward(Context& ctx, Tensor dq, Tensor dkey, const Tensor& dlse, const Tensor& q,
                               const Tensor& key, double scale) {
  ScratchScope temporaries(ctx.scratch);
  const Tensor sums = temporaries.alloc("extra_key.dkey", DType::f64, {key.numel()});
  if (ctx.dry_run) return;
  with_storage_type(q.dtype,
                    [&](auto t) { logits_backward_t<decltype(t)>(dq, dkey, sums, dlse, q, key, scale); });
}

#include "ops/cpu/isa_end.h"
