// Bound by memory: b is read once, and strips are written past the caches, line by line, since all matrices
// of a model are packed before the first of them is read.
#include "ops/strip_pack.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/parallel_for.h"

// In this order.
// clang-format off
#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/vectors.h"
// clang-format on

namespace {

constexpr int64_t W = Simd<float>::kWidth;
static_assert(kStripColumns % W == 0 && kStripRows % W == 0);

}  // namespace

void strip_pack(Context& ctx, int64_t k, int64_t n, bool transposed, const float* b, float* packed) {
  if (ctx.dry_run) return;
  const int64_t rows = ceil_div(k, kStripRows) * kStripRows, strips = ceil_div(n, kStripColumns);
  const int64_t pieces = ceil_div(rows, 4 * kStripRows);  // of a strip, for threads
  parallel_for(strips * pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t s = i / pieces, begin = i % pieces * 4 * kStripRows,
                    end = std::min(begin + 4 * kStripRows, rows);
      float* const strip = packed + s * rows * kStripColumns;
      for (int64_t row = begin; row < end; row += W)
        for (int64_t column = 0; column < kStripColumns; column += W) {
          const int64_t at = s * kStripColumns + column, some_rows = std::clamp<int64_t>(k - row, 0, W),
                        some_columns = std::clamp<int64_t>(n - at, 0, W);
          Vec<float> tile[W];
          const int64_t lines = transposed ? some_columns : some_rows,
                        length = transposed ? some_rows : some_columns;
          const float* const from = transposed ? b + at * k + row : b + row * n + at;
          const int64_t step = transposed ? k : n;
          for (int64_t j = 0; j < W; ++j) {
            if (j >= lines || length == 0)
              tile[j] = Vec<float>{};
            else
              tile[j] = length == W ? load_vec(from + j * step) : load_part(from + j * step, length);
          }
          if (transposed) transpose<float>(tile);
          for (int64_t j = 0; j < W; ++j)
            store_past_caches(strip + (row + j) * kStripColumns + column, tile[j]);
        }
    }
    end_stores_past_caches();
  });
}

#include "ops/cpu/isa_end.h"
