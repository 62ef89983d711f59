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
// clang-format on

namespace {

/// A vector of p, or its first n elements and zeros.
template <class T>
[[gnu::always_inline]] inline Vec<accumulate_t<T>> take(const T* p, int64_t n) {
  return n >= Simd<accumulate_t<T>>::kWidth ? load_vec(p) : load_part(p, n);
}
template <class T>
[[gnu::always_inline]] inline void put(T* p, Vec<accumulate_t<T>> x, int64_t n) {
  n >= Simd<accumulate_t<T>>::kWidth ? store_vec(p, x) : store_part(p, x, n);
}
template <class T>
[[gnu::always_inline]] inline Vec<accumulate_t<T>> take_weight(const T* weight, int64_t at, int64_t n) {
  return weight ? take(weight + at, n) : splat(accumulate_t<T>(1));
}

/// The tables of a step, and the sizes of x (T, H, D).
template <class A>
struct Rotation {
  const int32_t* positions;
  const A *cos_table, *sin_table;
  int64_t tokens, heads, half;

  Rotation(const Tensor& x, const Tensor& positions_, const Tensor& cos_, const Tensor& sin_)
      : positions(positions_.as<int32_t>()),
        cos_table(cos_.as<A>()),
        sin_table(sin_.as<A>()),
        tokens(x.dim(0)),
        heads(x.dim(1)),
        half(x.dim(2) / 2) {}
  const A* cos(int64_t t) const { return cos_table + positions[t] * half; }
  const A* sin(int64_t t) const { return sin_table + positions[t] * half; }
  int64_t width() const { return 2 * half; }
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
    const Rotation<A> turn(x, positions, cos, sin);
    const int64_t heads = turn.heads, width = turn.width();
    const int64_t weight_step = weight && weight.numel() > width ? width : 0;
    const T* const w = weight ? weight.as<T>() : nullptr;
    parallel_for(turn.tokens, 16384 / std::max<int64_t>(heads * width, 1) + 1,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t t = begin; t < end; ++t) {
                     const T* const from = x.as<T>() + t * heads * width;
                     T* const to = y.as<T>() + t * heads * width;
                     A* const r = rstd.as<A>() + t * heads;
                     for (int64_t h = 0; h < heads; ++h) r[h] = sum_squares(from + h * width, width);
#pragma omp simd
                     for (int64_t h = 0; h < heads; ++h)
                       r[h] = A(1) / std::sqrt(r[h] / static_cast<A>(width) + static_cast<A>(eps));
                     for (int64_t h = 0; h < heads; ++h)
                       forward_row(to + h * width, from + h * width, w ? w + h * weight_step : w, r[h],
                                   turn.cos(t), turn.sin(t), turn.half);
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
    const Rotation<A> turn(x, positions, cos, sin);
    const int64_t weight_step = weights > width ? width : 0;
    const T* const w = weight ? weight.as<T>() : nullptr;
    parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        A* const dw = w ? partials.as<A>() + k * weights : nullptr;
        std::fill_n(dw, weights, A(0));
        for (int64_t t = k * chunk; t < std::min((k + 1) * chunk, tokens); ++t)
          for (int64_t h = 0; h < heads; ++h) {
            const int64_t row = t * heads + h, at = h * weight_step;
            backward_row(dx.as_rows<T>() + t * dx.stride() + h * width, dw ? dw + at : dw,
                         dy.as<T>() + row * width, x.as<T>() + row * width, w ? w + at : w, rstd.as<A>()[row],
                         turn.cos(t), turn.sin(t), turn.half);
          }
      }
    });
    parallel_for(weights, 4096, [&](int64_t begin, int64_t end) {
      A* const dw = dweight.as<A>();
      for (int64_t k = 0; k < chunks; ++k) {
        const A* const part = partials.as<A>() + k * weights;
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) dw[i] += part[i];
      }
    });
  });
}

#include "ops/cpu/isa_end.h"
