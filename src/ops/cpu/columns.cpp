// Bound by memory: rows over threads.
#include "ops/columns.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

namespace {

/// body(columns, row) for each row of the part and its columns of the whole, which begin at `begin`.
template <class Body>
void for_each_row(const Tensor& whole, const Tensor& part, int64_t begin, Body&& body) {
  const int64_t width = whole.dim(1), n = part.dim(1);
  with_storage_type(whole.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(whole.dim(0), 16384 / std::max<int64_t>(n, 1) + 1, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) body(whole.as<T>() + t * width + begin, part.as<T>() + t * n);
    });
  });
}

}  // namespace

void add_columns(Context& ctx, Tensor y, const Tensor& part, int64_t begin) {
  if (ctx.dry_run) return;
  for_each_row(y, part, begin, [n = part.dim(1)](auto* to, const auto* from) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(to + i, load(to + i) + load(from + i));
  });
}

void put_columns(Context& ctx, Tensor y, const Tensor& part, int64_t begin) {
  if (ctx.dry_run) return;
  for_each_row(y, part, begin, [n = part.dim(1)](auto* to, const auto* from) { std::copy_n(from, n, to); });
}

void take_columns(Context& ctx, Tensor part, const Tensor& x, int64_t begin) {
  if (ctx.dry_run) return;
  for_each_row(x, part, begin, [n = part.dim(1)](const auto* from, auto* to) { std::copy_n(from, n, to); });
}

#include "ops/cpu/isa_end.h"
