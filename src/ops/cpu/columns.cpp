// Bound by memory: rows over threads.
#include "ops/columns.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

void add_columns(Context& ctx, Tensor y, const Tensor& part, int64_t begin) {
  if (ctx.dry_run) return;
  const int64_t width = y.dim(1), n = part.dim(1);
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(y.dim(0), 16384 / std::max<int64_t>(n, 1) + 1, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        const T* from = part.as<T>() + t * n;
        T* to = y.as<T>() + t * width + begin;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) store(to + i, load(to + i) + load(from + i));
      }
    });
  });
}

void put_columns(Context& ctx, Tensor y, const Tensor& part, int64_t begin) {
  if (ctx.dry_run) return;
  const int64_t width = y.dim(1), n = part.dim(1);
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(y.dim(0), 16384 / std::max<int64_t>(n, 1) + 1, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t)
        std::copy_n(part.as<T>() + t * n, n, y.as<T>() + t * width + begin);
    });
  });
}

void take_columns(Context& ctx, Tensor part, const Tensor& x, int64_t begin) {
  if (ctx.dry_run) return;
  const int64_t width = x.dim(1), n = part.dim(1);
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(x.dim(0), 16384 / std::max<int64_t>(n, 1) + 1, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t)
        std::copy_n(x.as<T>() + t * width + begin, n, part.as<T>() + t * n);
    });
  });
}

#include "ops/cpu/isa_end.h"
