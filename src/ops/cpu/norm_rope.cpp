// Bound by memory: a row is read once from memory, and what is done to it again finds it in cache. Nothing is
// rounded between the norm and the rotation. dweight is summed in chunks of tokens, whose number depends only
// on the shape, then over chunks in order.
#include "ops/norm_rope.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/parallel_for.h"

// In this order.
// clang-format off
#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/vectors.h"
#include "ops/cpu/rope_table.h"
#include "ops/cpu/partials.h"
// clang-format on

namespace {

template <class T>
[[gnu::always_inline]] inline Vec<accumulate_t<T>> take_weight(const T* weight, int64_t at, int64_t n) {
  return weight ? take(weight + at, n) : splat(accumulate_t<T>(1));
}

/// The sizes of x (T, H, D), the cosines and sines of a token, and the weight of a head, which may be null.
template <class T>
struct Heads {
  using A = accumulate_t<T>;
  const int32_t* positions;
  const A *cos_table, *sin_table;
  const T* weights;
  int64_t tokens, heads, width, half, weight_step;

  Heads(const Tensor& x, const Tensor& weight_, const Tensor& positions_, const Tensor& cos_,
        const Tensor& sin_)
      : positions(positions_.as<int32_t>()),
        cos_table(cos_.as<A>()),
        sin_table(sin_.as<A>()),
        weights(weight_ ? weight_.as<T>() : nullptr),
        tokens(x.dim(0)),
        heads(x.dim(1)),
        width(x.dim(2)),
        half(width / 2),
        weight_step(weight_.numel() > width ? width : 0) {}
  const A* cos(int64_t t) const { return cos_table + positions[t] * half; }
  const A* sin(int64_t t) const { return sin_table + positions[t] * half; }
  const T* weight(int64_t h) const { return weights ? weights + h * weight_step : nullptr; }
};

template <class T>
accumulate_t<T> sum_squares(const T* row, int64_t n) {
  using A = accumulate_t<T>;
  constexpr int64_t W = Simd<A>::kWidth;
  Vec<A> sum{};
  for (int64_t i = 0; i < n; i += W) {
    const Vec<A> v = take(row + i, n - i);
    sum += v * v;
  }
  return sum_lanes<A>(sum);
}

template <class T>
void forward_row(T* y, const T* x, const T* weight, accumulate_t<T> r, const accumulate_t<T>* cos,
                 const accumulate_t<T>* sin, int64_t half) {
  using A = accumulate_t<T>;
  for (int64_t i = 0; i < half; i += Simd<A>::kWidth) {
    const int64_t n = half - i;
    const Vec<A> a = take_weight(weight, i, n) * (take(x + i, n) * r),
                 b = take_weight(weight, half + i, n) * (take(x + half + i, n) * r), c = take(cos + i, n),
                 s = take(sin + i, n);
    put(y + i, a * c - b * s, n);
    put(y + half + i, b * c + a * s, n);
  }
}

/// Adds to dw, unless it is null, and writes dx, which may be dy.
template <class T>
void backward_row(T* dx, accumulate_t<T>* dw, const T* dy, const T* x, const T* weight, accumulate_t<T> r,
                  const accumulate_t<T>* cos, const accumulate_t<T>* sin, int64_t half) {
  using A = accumulate_t<T>;
  constexpr int64_t W = Simd<A>::kWidth;
  struct Pair {
    Vec<A> low, high;
  };
  const auto turned_back = [&](int64_t i, int64_t n) {
    const Vec<A> a = take(dy + i, n), b = take(dy + half + i, n), c = take(cos + i, n), s = take(sin + i, n);
    return Pair{a * c + b * s, b * c - a * s};
  };
  Vec<A> sum{};
  for (int64_t i = 0; i < half; i += W) {
    const int64_t n = half - i;
    const Pair d = turned_back(i, n);
    const Vec<A> a = d.low * take(x + i, n), b = d.high * take(x + half + i, n);
    sum += a * take_weight(weight, i, n) + b * take_weight(weight, half + i, n);
    if (!dw) continue;
    put(dw + i, take(dw + i, n) + a * r, n);
    put(dw + half + i, take(dw + half + i, n) + b * r, n);
  }
  const A k = r * r * (sum_lanes<A>(sum) / static_cast<A>(2 * half));
  for (int64_t i = 0; i < half; i += W) {
    const int64_t n = half - i;
    const Pair d = turned_back(i, n);
    const Vec<A> a = r * (d.low * take_weight(weight, i, n) - take(x + i, n) * k),
                 b = r * (d.high * take_weight(weight, half + i, n) - take(x + half + i, n) * k);
    put(dx + i, a, n);
    put(dx + half + i, b, n);
  }
}

}  // namespace

void norm_rope_forward(Context& ctx, Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight, double eps,
                       const Tensor& positions, const Tensor& cos, const Tensor& sin) {
  if (ctx.dry_run) return;
  check_positions("norm_rope_forward", positions, cos);
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const Heads<T> of(x, weight, positions, cos, sin);
    const int64_t heads = of.heads, width = of.width, row = heads * width;
    const T* const from = x.as<T>();
    T* const to = y.as<T>();
    A* const r = rstd.as<A>();
    parallel_for(of.tokens, 16384 / std::max<int64_t>(row, 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        A* const rt = r + t * heads;
        for (int64_t h = 0; h < heads; ++h) rt[h] = sum_squares(from + t * row + h * width, width);
#pragma omp simd
        for (int64_t h = 0; h < heads; ++h)
          rt[h] = A(1) / std::sqrt(rt[h] / static_cast<A>(width) + static_cast<A>(eps));
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = t * row + h * width;
          forward_row(to + at, from + at, of.weight(h), rt[h], of.cos(t), of.sin(t), of.half);
        }
      }
    });
  });
}

void norm_rope_backward(Context& ctx, Tensor dx, Tensor dweight, const Tensor& dy, const Tensor& x,
                        const Tensor& weight, const Tensor& rstd, const Tensor& positions, const Tensor& cos,
                        const Tensor& sin) {
  const int64_t tokens = x.dim(0), heads = x.dim(1), width = x.dim(2), weights = weight ? weight.numel() : 0;
  // At most 64 chunks, of at least 16 Ki elements and several times the weight.
  const int64_t chunk = std::max({(tokens + 63) / 64, 16384 / std::max<int64_t>(heads * width, 1) + 1,
                                  weights > width ? int64_t{4} : int64_t{1}});
  const int64_t chunks = (tokens + chunk - 1) / chunk;
  ScratchScope scratch(ctx.scratch);
  const Tensor partials =
      weight ? scratch.alloc("norm_rope_dweight", dweight.dtype, {std::max<int64_t>(chunks, 1), weights})
             : Tensor();
  if (ctx.dry_run) return;
  check_positions("norm_rope_backward", positions, cos);
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const Heads<T> of(x, weight, positions, cos, sin);
    const T *const from = x.as<T>(), *const d = dy.as<T>();
    T* const to = dx.as_rows<T>();
    const A* const r = rstd.as<A>();
    A* const all = weight ? partials.as<A>() : nullptr;
    const int64_t stride = dx.stride();
    parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        A* const dw = all ? all + k * weights : nullptr;
        std::fill_n(dw, weights, A(0));
        for (int64_t t = k * chunk; t < std::min((k + 1) * chunk, tokens); ++t)
          for (int64_t h = 0; h < heads; ++h) {
            const int64_t at = (t * heads + h) * width;
            backward_row(to + t * stride + h * width, dw ? dw + h * of.weight_step : nullptr, d + at,
                         from + at, of.weight(h), r[t * heads + h], of.cos(t), of.sin(t), of.half);
          }
      }
    });
    if (weight) add_partials<A>(dweight, partials, chunks);
  });
}

#include "ops/cpu/isa_end.h"
