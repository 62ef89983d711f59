// Bound by memory: one read and one write of x.
#include "ops/rope.h"

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

/// direction +1 rotates by the position's angles, -1 back.
template <class T>
void rotate(const char* op, Tensor y, const Tensor& x, const Tensor& positions, const Tensor& cos,
            const Tensor& sin, accumulate_t<T> direction) {
  using A = accumulate_t<T>;
  const int64_t tokens = x.dim(0), heads = x.dim(1), half = x.dim(2) / 2;
  check_positions(op, positions, cos);
  const int32_t* const position = positions.as<int32_t>();
  T* const out = y.as_rows<T>();
  const int64_t row = y.stride();
  const T* const in = x.as<T>();
  const A *const cos_table = cos.as<A>(), *const sin_table = sin.as<A>();
  parallel_for(tokens, 32, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const A *c = cos_table + position[t] * half, *s = sin_table + position[t] * half;
      for (int64_t h = 0; h < heads; ++h) {
        const T *x1 = in + (t * heads + h) * 2 * half, *x2 = x1 + half;
        T *y1 = out + t * row + h * 2 * half, *y2 = y1 + half;
        // y may be x: both elements of a pair are read before either is written.
        for_vectors<A>(half, [&](int64_t i, int64_t n) {
          const Vec<A> a = take(x1 + i, n), b = take(x2 + i, n), ci = take(c + i, n),
                       si = direction * take(s + i, n);
          put(y1 + i, a * ci - b * si, n);
          put(y2 + i, b * ci + a * si, n);
        });
      }
    }
  });
}

void rotate_any(const char* op, Tensor y, const Tensor& x, const Tensor& positions, const Tensor& cos,
                const Tensor& sin, int direction) {
  with_storage_type(x.dtype, [&](auto t) {
    using T = decltype(t);
    rotate<T>(op, y, x, positions, cos, sin, static_cast<accumulate_t<T>>(direction));
  });
}

}  // namespace

void rope_forward(Context& ctx, Tensor y, const Tensor& x, const Tensor& positions, const Tensor& cos,
                  const Tensor& sin) {
  if (ctx.dry_run) return;
  rotate_any("rope_forward", y, x, positions, cos, sin, 1);
}

void rope_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& positions, const Tensor& cos,
                   const Tensor& sin) {
  if (ctx.dry_run) return;
  rotate_any("rope_backward", dx, dy, positions, cos, sin, -1);
}

#include "ops/cpu/isa_end.h"
