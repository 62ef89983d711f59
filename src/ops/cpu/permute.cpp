// The plan is one pass over integers and negligible compared with the products. Combining reads every row
// once.
#include "ops/permute.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

void permute_plan(Context& ctx, const Permutation& permutation, const Tensor& experts) {
  const int64_t E = permutation.offsets.dim(0) - 1, K = experts.dim(1), R = experts.numel();
  ScratchScope t(ctx.scratch);
  const Tensor cursors = t.alloc("permutation cursors", DType::i32, {E});
  if (ctx.dry_run) return;
  int32_t *offsets = permutation.offsets.as<int32_t>(), *next = cursors.as<int32_t>();
  const int32_t* expert = experts.as<int32_t>();
  std::fill_n(offsets, E + 1, 0);
  for (int64_t slot = 0; slot < R; ++slot) {
    SLUICE_CHECK(expert[slot] >= 0 && expert[slot] < E, "permute_plan: expert {} of {}", expert[slot], E);
    ++offsets[expert[slot] + 1];
  }
  for (int64_t e = 0; e < E; ++e) {
    offsets[e + 1] += offsets[e];
    next[e] = offsets[e];
  }
  for (int64_t slot = 0; slot < R; ++slot) {
    const int32_t row = next[expert[slot]]++;
    permutation.slots.as<int32_t>()[row] = static_cast<int32_t>(slot);
    permutation.tokens.as<int32_t>()[row] = static_cast<int32_t>(slot / K);
    permutation.rows.as<int32_t>()[slot] = row;
  }
}

void unpermute(Context& ctx, Tensor y, const Tensor& x, const Tensor& rows, Into into) {
  if (ctx.dry_run) return;
  constexpr int64_t kColumns = 128;  // summed in registers and the innermost cache
  const int64_t C = x.dim(1), K = rows.dim(1);
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    parallel_for(rows.dim(0), 16, [&](int64_t begin, int64_t end) {
      std::array<A, kColumns> sum;
      for (int64_t t = begin; t < end; ++t) {
        const int32_t* row = rows.as<int32_t>() + t * K;
        for (int64_t first = 0; first < C; first += kColumns) {
          const int64_t n = std::min(kColumns, C - first);
          A* s = sum.data();
          std::fill_n(s, n, A(0));
          for (int64_t k = 0; k < K; ++k) {
            const T* in = x.as<T>() + row[k] * C + first;
#pragma omp simd
            for (int64_t c = 0; c < n; ++c) s[c] += load(in + c);
          }
          T* out = y.as<T>() + t * C + first;
          if (into == Into::add) {
#pragma omp simd
            for (int64_t c = 0; c < n; ++c) store(out + c, load(out + c) + s[c]);
          } else {
#pragma omp simd
            for (int64_t c = 0; c < n; ++c) store(out + c, s[c]);
          }
        }
      }
    });
  });
}

/// body(i) for rows of so many bytes that are copied.
template <class Body>
void for_each_row(int64_t rows, int64_t row_bytes, Body&& body) {
  parallel_for(rows, std::max<int64_t>(1, (64 << 10) / std::max<int64_t>(row_bytes, 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) body(i);
               });
}

void take_rows(Context& ctx, Tensor y, const Tensor& x, const Tensor& index) {
  if (ctx.dry_run) return;
  const int64_t bytes = x.dim(1) * dtype_size(x.dtype);
  auto* to = static_cast<char*>(y.data);
  const auto* from = static_cast<const char*>(x.data);
  const int32_t* rows = index.as<int32_t>();
  for_each_row(y.dim(0), bytes, [&](int64_t i) {
    std::memcpy(to + i * bytes, from + rows[i] * bytes, static_cast<size_t>(bytes));
  });
}

void put_rows(Context& ctx, Tensor y, const Tensor& x, const Tensor& index) {
  if (ctx.dry_run) return;
  const int64_t bytes = x.dim(1) * dtype_size(x.dtype);
  auto* to = static_cast<char*>(y.data);
  const auto* from = static_cast<const char*>(x.data);
  const int32_t* rows = index.as<int32_t>();
  for_each_row(x.dim(0), bytes, [&](int64_t i) {
    std::memcpy(to + rows[i] * bytes, from + i * bytes, static_cast<size_t>(bytes));
  });
}

void move_rows_last(Context& ctx, Tensor rows, int64_t begin, int64_t count, int64_t end) {
  if (ctx.dry_run) return;
  int32_t* row = rows.as<int32_t>();
  parallel_for(rows.numel(), 16384, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      if (row[i] >= begin + count)
        row[i] -= static_cast<int32_t>(count);
      else if (row[i] >= begin)
        row[i] += static_cast<int32_t>(end - begin - count);
  });
}

void number_rows(Context& ctx, Tensor index) {
  if (ctx.dry_run) return;
  int32_t* row = index.as<int32_t>();
  for (int64_t i = 0; i < index.numel(); ++i) row[i] = static_cast<int32_t>(i);
}

#include "ops/cpu/isa_end.h"
