// Memory-bound: a row is read once from memory, and the second pass finds it in cache. dweight is summed in
// chunks of rows, whose number depends only on the shape, then over chunks in order.
#include "ops/rmsnorm.h"

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
#include "ops/cpu/partials.h"
// clang-format on

/// Rows [begin, end), a few at a time: their roots and divisions wait for nothing but each other.
template <class T, class A>
void forward_rows(T* y, A* rstd, const T* x, const T* weight, int64_t begin, int64_t end, int64_t width,
                  int64_t groups, double eps) {
  const int64_t block = std::clamp<int64_t>(4096 / width, 1, 64);
  for (int64_t first = begin; first < end; first += block) {
    const int64_t last = std::min(first + block, end);
    for (int64_t i = first; i < last; ++i) {
      const T* row = x + i * width;
      A squares = 0;
#pragma omp simd reduction(+ : squares)
      for (int64_t c = 0; c < width; ++c) squares += load(row + c) * load(row + c);
      rstd[i] = squares;
    }
#pragma omp simd
    for (int64_t i = first; i < last; ++i)
      rstd[i] = A(1) / std::sqrt(rstd[i] / static_cast<A>(width) + static_cast<A>(eps));
    for (int64_t i = first; i < last; ++i) {
      const T* row = x + i * width;
      T* out = y + i * width;
      const A r = rstd[i];
      if (!weight) {
        for_vectors<A>(width, [&](int64_t c, int64_t n) { put(out + c, take(row + c, n) * r, n); });
        continue;
      }
      const T* w = weight + i % groups * width;
      for_vectors<A>(width,
                     [&](int64_t c, int64_t n) { put(out + c, take(w + c, n) * (take(row + c, n) * r), n); });
    }
  }
}

void rmsnorm_forward(Context& ctx, Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight, double eps) {
  if (ctx.dry_run) return;
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const int64_t width = x.dim(-1), rows = x.numel() / width, groups = weight ? weight.numel() / width : 1;
    parallel_for(rows, 16384 / width, [&](int64_t begin, int64_t end) {
      forward_rows(y.as<T>(), rstd.as<A>(), x.as<T>(), weight ? weight.as<T>() : nullptr, begin, end, width,
                   groups, eps);
    });
  });
}

/// One row: dw += dy x r, and dx. All of dy is read before dx, which may be the same memory, is written.
template <class T>
void backward_row(T* dx, accumulate_t<T>* dw, const T* dy, const T* x, const T* weight, accumulate_t<T> r,
                  int64_t width, Into into) {
  using A = accumulate_t<T>;
  A gx = 0;
#pragma omp simd reduction(+ : gx)
  for (int64_t i = 0; i < width; ++i) {
    const A dyx = load(dy + i) * load(x + i);
    gx += dyx * load(weight + i);
    dw[i] += dyx * r;
  }
  const A c = r * r * (gx / static_cast<A>(width));
  const auto gradient = [&](int64_t i, int64_t n) {
    return r * (take(dy + i, n) * take(weight + i, n) - take(x + i, n) * c);
  };
  if (into == Into::overwrite)
    for_vectors<A>(width, [&](int64_t i, int64_t n) { put(dx + i, gradient(i, n), n); });
  else
    for_vectors<A>(width, [&](int64_t i, int64_t n) { put(dx + i, take(dx + i, n) + gradient(i, n), n); });
}

/// The same without a weight.
template <class T>
void backward_plain_row(T* dx, const T* dy, const T* x, accumulate_t<T> r, int64_t width, Into into) {
  using A = accumulate_t<T>;
  A gx = 0;
#pragma omp simd reduction(+ : gx)
  for (int64_t i = 0; i < width; ++i) gx += load(dy + i) * load(x + i);
  const A c = r * r * (gx / static_cast<A>(width));
  const auto gradient = [&](int64_t i, int64_t n) { return r * (take(dy + i, n) - take(x + i, n) * c); };
  if (into == Into::overwrite)
    for_vectors<A>(width, [&](int64_t i, int64_t n) { put(dx + i, gradient(i, n), n); });
  else
    for_vectors<A>(width, [&](int64_t i, int64_t n) { put(dx + i, take(dx + i, n) + gradient(i, n), n); });
}

void backward_plain(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& rstd, Into into) {
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    const int64_t width = x.dim(-1);
    parallel_for(x.numel() / width, 16384 / width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        backward_plain_row(dx.as<T>() + i * width, dy.as<T>() + i * width, x.as<T>() + i * width,
                           rstd.as<accumulate_t<T>>()[i], width, into);
    });
  });
}

void rmsnorm_backward(Context& ctx, Tensor dx, Tensor dweight, const Tensor& dy, const Tensor& x,
                      const Tensor& weight, const Tensor& rstd, Into into) {
  if (!weight) {
    if (!ctx.dry_run) backward_plain(dx, dy, x, rstd, into);
    return;
  }
  const int64_t width = x.dim(-1), rows = x.numel() / width, weights = weight.numel(),
                groups = weights / width;
  // At most 64 chunks, of at least 16 Ki elements and several times the weight.
  const int64_t chunk = std::max({(rows + 63) / 64, 16384 / width + 1, 4 * groups});
  const int64_t chunks = (rows + chunk - 1) / chunk;
  ScratchScope scratch(ctx.scratch);
  const Tensor partials =
      scratch.alloc("rmsnorm_dweight", dweight.dtype, {std::max<int64_t>(chunks, 1), weights});
  if (ctx.dry_run) return;
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        A* dw = partials.as<A>() + k * weights;
        std::fill_n(dw, weights, A(0));
        for (int64_t i = k * chunk; i < std::min((k + 1) * chunk, rows); ++i) {
          const int64_t group = i % groups * width, at = i * width;
          backward_row(dx.as<T>() + at, dw + group, dy.as<T>() + at, x.as<T>() + at, weight.as<T>() + group,
                       rstd.as<A>()[i], width, into);
        }
      }
    });
    add_partials<A>(dweight, partials, chunks);
  });
}

#include "ops/cpu/isa_end.h"
