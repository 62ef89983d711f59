// The products of all experts are divided into units of at most 256 x 256 results, which threads take
// dynamically; the sum of each result has a fixed order, whichever thread computes it. A unit gathers and
// widens its rows of activations, and transposes or copies its part of the weight, into per-thread blocks
// that fit the caches; this costs a few percent of the arithmetic from a few tens of rows per expert on.
// There are no packed copies of weights, because writing and reading them would cost more than they save at
// the few hundred rows of an expert in a step.
#include "ops/grouped_linear.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/cpu_features.h"
#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/vectors.h"
#include "ops/cpu/grouped_tiles.h"
#include "ops/cpu/pairs.h"
#include "ops/cpu/tile_units.h"
#include "ops/cpu/grouped_units.h"

namespace {

/// A part of one group's result; rows and columns are relative to the group.
struct Unit {
  int64_t group;
  Cut::Part rows, columns;
};

/// Calls body(unit, thread) for every unit of every group, over threads. Group g has size(g) rows, divided
/// into parts of at most kBlockRows, and `columns`, divided into parts of at most kBlockColumns, which are
/// multiples of `strip`.
template <class Size, class Body>
void for_each_unit(int64_t groups, int64_t columns, int64_t row_most, int64_t strip, Size&& size,
                   Body&& body) {
  const Cut column_cut(columns, kBlockColumns, strip);
  std::atomic<int64_t> next{0};
  parallel_for(num_threads(), 1, [&](int64_t thread, int64_t) {
    int64_t mine = next.fetch_add(1, std::memory_order_relaxed), first = 0;  // of group g
    for (int64_t g = 0; g < groups; ++g) {
      const Cut row_cut(size(g), row_most, 1);
      const int64_t count = row_cut.parts * column_cut.parts;
      for (; mine < first + count; mine = next.fetch_add(1, std::memory_order_relaxed)) {
        const int64_t i = (mine - first) / column_cut.parts, j = (mine - first) % column_cut.parts;
        body(Unit{g, row_cut[i], column_cut[j]}, thread);
      }
      first += count;
    }
  });
}

inline int64_t row_of(const int32_t* index, int64_t row) { return index ? index[row] : row; }

/// y_r = x_r W_g^T with W (N, K), or x_r W_g with W (K, N): K is x's width, N is y's.
void product_of_rows(Context& ctx, const Tensor& y, const Tensor& x, const LinearWeight& w,
                     const Tensor& offsets, const Tensor& index, bool transposed) {
  constexpr int64_t kStrips = 4;  // of the weight that are packed at a time
  const int64_t rows = y.dim(0), N = y.dim(1), K = x.dim(1);
  if (rows == 0) return;
  const int64_t block_rows = std::min(kBlockRows, rows), strip_most = 2 * 16;
  const DType wide = accumulate_dtype(x.dtype);
  ScratchScope t(ctx.scratch);
  const Tensor a_blocks = t.alloc("rows of a group", wide,
                                  {num_threads(), Cut(K, kBlockDepth, 16).parts * block_rows * kRowStride}),
               b_blocks =
                   t.alloc("strips of a weight", wide, {num_threads(), kStrips * strip_most * kBlockDepth}),
               c_blocks =
                   t.alloc("sums of a group", wide, {num_threads(), kStrips * strip_most * block_rows});
  if (ctx.dry_run) return;
  with_elements(x.dtype, [&](auto elements) {
    using E = decltype(elements);
    using T = typename E::Storage;
    using A = typename E::A;
    constexpr int64_t S = E::kStripWidth;
    const Cut chunks(K, E::kUnit * kBlockDepth, E::kUnit * 16);
    const int32_t *offset = offsets.as<int32_t>(), *indices = index ? index.as<int32_t>() : nullptr;
    const auto size = [offset](int64_t g) -> int64_t { return offset[g + 1] - offset[g]; };
    for_each_unit(w.groups, N, kBlockRows, S, size, [&](const Unit& unit, int64_t thread) {
      A *a = a_blocks.rows(thread, 1).as<A>(), *b = b_blocks.rows(thread, 1).as<A>(),
        *c = c_blocks.rows(thread, 1).as<A>();
      E::begin();
      const int64_t m = unit.rows.size(), first = offset[unit.group] + unit.rows.begin;
      const Tiles tiles = E::tiles(m);
      const T* weight = w.value.as<T>() + unit.group * N * K;
      for (int64_t r = 0; r < m; ++r) {
        const T* from = x.as<T>() + row_of(indices, first + r) * K;
        for (int64_t i = 0; i < chunks.parts; ++i)
          E::row(a + (i * m + r) * kRowStride, from + chunks[i].begin, chunks[i].size());
      }
      for (int64_t n = unit.columns.begin; n < unit.columns.end; n += kStrips * S) {
        const int64_t columns = std::min(kStrips * S, unit.columns.end - n);
        for (int64_t i = 0; i < chunks.parts; ++i) {
          const Cut::Part chunk = chunks[i];
          const int64_t depth = chunk.size(), units = E::units(depth);
          if (transposed)
            E::strips_transposed(b, depth, columns, weight + n * K + chunk.begin, K);
          else
            E::strips(b, depth, columns, [&](int64_t k) { return weight + (chunk.begin + k) * N + n; });
          for (int64_t s = 0; s * S < columns; ++s) {
            // Whole strips are written directly to y if it has the type of the sums.
            A* to = c + s * m * S;
            int64_t ld = S;
            if constexpr (std::is_same_v<T, A>)
              if (s * S + S <= columns) to = y.as<T>() + first * N + n + s * S, ld = N;
            for (int64_t j = 0; j < tiles.count; ++j)
              E::template tile<kRowStride, 1>(tiles[j + 1] - tiles[j], units,
                                              a + (i * m + tiles[j]) * kRowStride, b + s * S * units,
                                              to + tiles[j] * ld, ld, i > 0);
          }
        }
        for (int64_t r = 0; r < m; ++r)
          for (int64_t s = std::is_same_v<T, A> ? columns / S : 0; s * S < columns; ++s)
            store_row(y.as<T>() + (first + r) * N + n + s * S, c + (s * m + r) * S,
                      std::min(S, columns - s * S));
      }
      E::end();
    });
  });
}

}  // namespace

LinearPackedBytes grouped_linear_packed_bytes(Context&, DType, int64_t, int64_t, int64_t) { return {}; }

void grouped_linear_pack(Context&, const LinearWeight&) {}

void grouped_linear_forward(Context& ctx, Tensor y, const Tensor& x, const LinearWeight& w,
                            const Tensor& offsets, const Tensor& index) {
  product_of_rows(ctx, y, x, w, offsets, index, true);
}

void grouped_linear_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LinearWeight& w,
                                   const Tensor& offsets, const Tensor& index) {
  product_of_rows(ctx, dx, dy, w, offsets, index, false);
}

void grouped_linear_backward_weight(Context& ctx, Tensor dw, const Tensor& dy, const Tensor& x,
                                    const Tensor& offsets, const Tensor& dy_index, const Tensor& x_index,
                                    Into into) {
  const int64_t groups = offsets.dim(0) - 1, N = dy.dim(1), K = x.dim(1);
  const int64_t rows = dy_index ? dy_index.dim(0) : x_index ? x_index.dim(0) : x.dim(0);
  const bool overwrite = into == Into::overwrite;
  if (rows == 0 && !overwrite) return;
  const int64_t depth_most = std::min(kBlockDepth, std::max(rows, kUnitDepth / 2));
  const int64_t columns_most = std::min(kBlockColumns, N);
  const int64_t a_most =
      std::max(depth_most * ceil_div(columns_most, kTileHeight) * kTileStride, columns_most * kRowStride);
  ScratchScope t(ctx.scratch);
  const Tensor a_blocks = t.alloc("dy of a group", dw.dtype, {num_threads(), a_most}),
               b_blocks = t.alloc("x of a group", dw.dtype, {num_threads(), depth_most * kBlockColumns}),
               edges = t.alloc("edge of dw", dw.dtype, {num_threads(), kUnitRows * kUnitColumns});
  if (ctx.dry_run) return;
  with_elements(x.dtype, [&](auto elements) {
    using E = decltype(elements);
    using T = typename E::Storage;
    using A = typename E::A;
    constexpr int64_t S = E::kStripWidth;
    const int32_t *offset = offsets.as<int32_t>(), *dy_rows = dy_index ? dy_index.as<int32_t>() : nullptr,
                  *x_rows = x_index ? x_index.as<int32_t>() : nullptr;
    const auto size = [&](int64_t g) -> int64_t { return offset[g + 1] > offset[g] || overwrite ? N : 0; };
    for_each_unit(groups, K, kBlockColumns, S, size, [&](const Unit& unit, int64_t thread) {
      A *a = a_blocks.rows(thread, 1).as<A>(), *b = b_blocks.rows(thread, 1).as<A>(),
        *edge = edges.rows(thread, 1).as<A>();
      E::begin();
      const int64_t m = unit.rows.size(), columns = unit.columns.size(), first = offset[unit.group];
      const Tiles tiles = E::tiles(m);
      const Cut chunks(offset[unit.group + 1] - first, E::kUnit * kBlockDepth, E::kUnit);
      A* to = dw.as<A>() + (unit.group * N + unit.rows.begin) * K + unit.columns.begin;
      for (int64_t r = 0; chunks.parts == 0 && r < m; ++r) std::fill_n(to + r * K, columns, A(0));
      // What no one reads before the whole gradient is complete need not pass through the caches.
      const bool past_caches = overwrite && chunks.parts == 1 && lies_in_lines(to, K);
      for (int64_t i = 0; i < chunks.parts; ++i) {
        const int64_t depth = chunks[i].size(), units = E::units(depth), row = first + chunks[i].begin;
        const bool add = !overwrite || i > 0;
        E::strips(b, depth, columns,
                  [&](int64_t k) { return x.as<T>() + row_of(x_rows, row + k) * K + unit.columns.begin; });
        E::Columns::pack(a, depth, units, m, tiles, [&](int64_t k) {
          return dy.as<T>() + row_of(dy_rows, row + k) * N + unit.rows.begin;
        });
        // Tile by tile: dw has mostly left the caches, and comes back line after line.
        for (int64_t j = 0; j < tiles.count; ++j)
          for (int64_t s = 0; s * S < columns; ++s) {
            const int64_t height = tiles[j + 1] - tiles[j], width = std::min(S, columns - s * S);
            const A* const strip = b + s * S * units;
            A* tc = to + tiles[j] * K + s * S;
            if (width == S) {
              E::Columns::multiply(a, units, tiles, j, strip, tc, K, add, past_caches);
              continue;
            }
            E::Columns::multiply(a, units, tiles, j, strip, edge, S, false);
            for (int64_t h = 0; h < height; ++h)
              for (int64_t c = 0; c < width; ++c)
                tc[h * K + c] = add ? tc[h * K + c] + edge[h * S + c] : edge[h * S + c];
          }
      }
      E::end();
    });
  });
}

#include "ops/cpu/isa_end.h"
