// Bound by memory: one pass over tokens, in which the rows of a key/value head and of its heads stay in
// cache.
#include "ops/exclusive.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

namespace {

template <class T, class A = accumulate_t<T>>
A dot_of(const T* a, const T* b, int64_t n) {
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += load(a + i) * load(b + i);
  return sum;
}

/// 1 / (v . v), or 0 for a value without a direction.
template <class T, class A = accumulate_t<T>>
A inverse_square(const T* v, int64_t n) {
  const A square = dot_of(v, v, n);
  return square >= std::numeric_limits<A>::min() ? A(1) / square : A(0);
}

template <class A>
struct Projected {
  A c;
  bool parallel;  // y counts as c v
};

/// A function of its own, so that forward and backward decide alike. rounding: exclusive_rounding, squared.
template <class T, class A = accumulate_t<T>>
[[gnu::noinline]] Projected<A> project(const T* y, const T* v, A inverse, A rounding, int64_t n) {
  const A c = dot_of(y, v, n) * inverse;
  A rest = 0, square = 0;
#pragma omp simd reduction(+ : rest, square)
  for (int64_t i = 0; i < n; ++i) {
    const A x = load(y + i), r = x - c * load(v + i);
    rest += r * r;
    square += x * x;
  }
  return {c, rest < rounding * square};
}

template <class T, class A = accumulate_t<T>>
void scale_row(T* to, const T* from, A factor, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(to + i, factor * load(from + i));
}

template <class A>
A squared_rounding(const Tensor& y, bool normed) {
  const double rounding = exclusive_rounding(y.dtype, normed);
  return static_cast<A>(rounding * rounding);
}

struct ExclusiveShape {
  int64_t tokens, heads, kv_heads, depth, group;

  ExclusiveShape(const Tensor& y, const Tensor& v)
      : tokens(y.dim(0)), heads(y.dim(1)), kv_heads(v.dim(1)), depth(y.dim(2)), group(heads / kv_heads) {}
  /// body(row of v, first row of y) for every token and key/value head.
  template <class Body>
  void for_each_value(Body&& body) const {
    const int64_t grain = 16384 / std::max<int64_t>(group * depth, 1) + 1;
    parallel_for(tokens * kv_heads, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) body(r, r * group);
    });
  }
};

}  // namespace

void exclusive_forward(Context& ctx, Tensor z, const Tensor& y, const Tensor& v, const Tensor& s,
                       bool normed) {
  if (ctx.dry_run) return;
  const ExclusiveShape g(y, v);
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* scales = s ? s.as<T>() : nullptr;
    const A rounding = squared_rounding<A>(y, normed);
    g.for_each_value([&](int64_t value_row, int64_t first) {
      const T* value = v.as<T>() + value_row * g.depth;
      const A inverse = inverse_square(value, g.depth);
      for (int64_t row = first; row < first + g.group; ++row) {
        const T* from = y.as<T>() + row * g.depth;
        T* to = z.as<T>() + row * g.depth;
        const A scale = scales ? load(scales + row % g.heads) : A(1);
        const Projected<A> p = project(from, value, inverse, rounding, g.depth);
        if (p.parallel) {
          scale_row(to, from, A(1) - scale, g.depth);
          continue;
        }
        const A part = scale * p.c;
#pragma omp simd
        for (int64_t i = 0; i < g.depth; ++i) store(to + i, load(from + i) - part * load(value + i));
      }
    });
  });
}

void exclusive_backward_rows(Context& ctx, Tensor dy, Tensor dv, Tensor ds_rows, const Tensor& dz,
                             const Tensor& y, const Tensor& v, const Tensor& s, bool normed) {
  const ExclusiveShape g(y, v);
  ScratchScope scratch(ctx.scratch);
  const Tensor sums =
      scratch.alloc("exclusive.dv", accumulate_dtype(y.dtype), {v.dim(0), v.dim(1), v.dim(2)});
  if (ctx.dry_run) return;
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* scales = s ? s.as<T>() : nullptr;
    const A rounding = squared_rounding<A>(y, normed);
    g.for_each_value([&](int64_t value_row, int64_t first) {
      const T* value = v.as<T>() + value_row * g.depth;
      A* dvalue = sums.as<A>() + value_row * g.depth;
      const A inverse = inverse_square(value, g.depth);
      std::fill_n(dvalue, g.depth, A(0));
      for (int64_t row = first; row < first + g.group; ++row) {
        const T *out = y.as<T>() + row * g.depth, *dout = dz.as<T>() + row * g.depth;
        T* din = dy.as<T>() + row * g.depth;
        const A scale = scales ? load(scales + row % g.heads) : A(1);
        const Projected<A> p = project(out, value, inverse, rounding, g.depth);
        const A a = dot_of(dout, value, g.depth);
        if (ds_rows) ds_rows.as<A>()[row] = -p.c * a;
        if (p.parallel) {
          scale_row(din, dout, A(1) - scale, g.depth);
          continue;
        }
        const A of_dz = scale * p.c, of_y = scale * (a * inverse), of_v = A(2) * p.c * of_y;
#pragma omp simd
        for (int64_t i = 0; i < g.depth; ++i) {
          const A d = load(dout + i), x = load(value + i);
          dvalue[i] += of_v * x - of_dz * d - of_y * load(out + i);
          store(din + i, d - of_y * x);
        }
      }
      T* to = dv.as<T>() + value_row * g.depth;
#pragma omp simd
      for (int64_t i = 0; i < g.depth; ++i) store(to + i, dvalue[i]);
    });
  });
}

#include "ops/cpu/isa_end.h"
