// A product is divided into units of rows and strips, which threads take dynamically. A unit goes strip by
// strip; of a strip's part of b and of the rows of a, Unit::kDepthBlock elements at a time are multiplied, so
// that the strip's part stays in the first cache, or the second, while the rows stream from the second. Rows
// too long for that are multiplied with several strips, one block of the depth after the other.
#include "ops/tile_product.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
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

namespace {

using Layout = Product::Layout;
static_assert(kTileStrip == kPairStrip && kTileDepth == kUnitDepth);

/// Rows of b that are packed at a time, if sums may wait in c meanwhile.
constexpr int64_t kPackedDepth = 2048;
constexpr int64_t kRowsMost = 256, kRowsLeast = 64;

constexpr int64_t padded(int64_t n) { return ceil_div(n, kUnitDepth) * kUnitDepth; }

/// Elements between packed rows of a: mostly not a power of two, so that they do not fall on a few cache
/// sets.
template <class Unit>
constexpr int64_t packed_row(int64_t padded_depth) {
  return std::min(Unit::kDepthBlock, padded_depth) + 32;
}

/// How many strips are multiplied with one block of the depth of these rows before the next.
template <class Unit>
constexpr int64_t strips_together(int64_t rows, int64_t padded_depth) {
  const auto bytes = rows * padded_depth * static_cast<int64_t>(sizeof(bf16));
  return bytes > Unit::kRowBytes ? Unit::kStripsTogether : 1;
}

/// Packs strips [begin, end) of b (k, n).
template <bool kPastCaches>
void pack_strips_of(float* packed, int64_t begin, int64_t end, int64_t k, int64_t n, bool transposed,
                    const bf16* b, int64_t ld) {
  const int64_t units = padded(k) / 2;
  for (int64_t s = begin; s < end; ++s) {
    float* const to = packed + s * units * kPairStrip;
    const int64_t first = s * kPairStrip, columns = std::min(kPairStrip, n - first);
    if (transposed)
      pack_pairs_transposed<kPastCaches>(to, k, units, columns,
                                         [=](int64_t c) { return b + (first + c) * ld; });
    else
      pack_pairs<kPastCaches>(to, k, units, columns, [=](int64_t row) { return b + row * ld + first; });
  }
  if (kPastCaches) end_stores_past_caches();
}

template <bool kPastCaches>
void pack_all(float* packed, int64_t k, int64_t n, bool transposed, const bf16* b, int64_t ld) {
  parallel_for(ceil_div(n, kPairStrip), 1, [=](int64_t begin, int64_t end) {
    pack_strips_of<kPastCaches>(packed, begin, end, k, n, transposed, b, ld);
  });
}

/// Memory of one thread.
struct Blocks {
  bf16* rows;   // packed rows of a, or the last columns of rows that are not a multiple of kUnitDepth long
  float* sums;  // of the strips that are computed together
};

/// The rows of a of one unit.
struct Rows {
  const bf16* a;  // the first row, or column if transposed
  int64_t ld, count, depth;
  bool transposed;
};

/// How c is divided: rows of equal parts, and strips in groups.
struct Division {
  Cut rows, strips;
  Division(int64_t m, int64_t strip_count, bool packs_rows)
      : rows(m, row_part(m, packs_rows ? kRowsMost / 2 : kRowsMost), kUnitRows),
        strips(strip_count, packs_rows ? strip_count : strip_part(strip_count, rows.parts), 1) {}
  int64_t units() const { return rows.parts * strips.parts; }

 private:
  /// Enough parts for threads to share evenly, unless they would be too small.
  static int64_t row_part(int64_t m, int64_t most) {
    const int64_t turns = 2 * num_threads(), parts = turns * ceil_div(m, turns * most);
    return std::clamp(padded(ceil_div(m, parts)), kRowsLeast, most);
  }
  static int64_t strip_part(int64_t strips, int64_t row_parts) {
    return ceil_div(strips, std::min(strips, ceil_div(2 * num_threads(), row_parts)));
  }
};

/// One unit: rows of a times strips of b, into c from its first row on.
template <class Unit, class Out>
class UnitProduct {
 public:
  /// past_caches: c is overwritten, and not read soon.
  UnitProduct(const Blocks& blocks, const Rows& rows, const float* strips, int64_t padded_depth,
              bool past_caches)
      : blocks_(blocks),
        rows_(rows),
        strips_(strips),
        padded_depth_(padded_depth),
        packed_row_(packed_row<Unit>(padded_depth)),
        depths_(padded_depth, Unit::kDepthBlock, kUnitDepth),
        tiles_(rows.count, kUnitRows, kUnitRows),
        past_caches_(past_caches && (depths_.parts == 1 || kStreamsSums)) {
    if (rows_.transposed)
      pack_columns();
    else if (rows_.depth % kUnitDepth != 0)
      pack_tails();
  }

  /// These strips' columns of c, which has n columns.
  void run(const Cut::Part& strips, int64_t n, Out* c, bool add) const {
    const int64_t together = strips_together<Unit>(rows_.count, padded_depth_);
    for (int64_t first = strips.begin; first < strips.end; first += together)
      for (int64_t i = 0; i < depths_.parts; ++i)
        for (int64_t s = first; s < std::min(strips.end, first + together); ++s)
          part_of_strip(i, {s, s - first, std::min(kPairStrip, n - s * kPairStrip)}, c + s * kPairStrip, n,
                        add);
  }

 private:
  /// Whether what goes past the caches is summed elsewhere, since the unit's own stores are kept in them.
  static constexpr bool kStreamsSums = !Unit::kTakesStrips;

  struct Strip {
    int64_t index, place, columns;  // place: among those computed together
  };

  void part_of_strip(int64_t i, const Strip& strip, Out* c, int64_t ldc, bool add) const {
    for (int64_t t = 0; t < tiles_.count; ++t) {
      if (add && i == 0 && t + 1 < tiles_.count) prefetch(c, ldc, t + 1);
      tile(i, t, strip, c + tiles_[t] * ldc, ldc, add);
    }
  }

  void prefetch(const Out* c, int64_t ldc, int64_t t) const {
    for (int64_t r = tiles_[t]; r < tiles_[t + 1]; ++r)
      for (size_t i = 0; i < kUnitColumns * sizeof(Out); i += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(c + r * ldc) + i, 1);
  }

  /// Part i of the depth of tile t, which begins at c. Sums that are not made in c wait in memory of their
  /// own; all tiles share it where the depth has one part.
  void tile(int64_t i, int64_t t, const Strip& strip, Out* c, int64_t ldc, bool add) const {
    const int64_t rows = tiles_[t + 1] - tiles_[t], columns = strip.columns;
    const bool last = i + 1 == depths_.parts;
    const float* const b = strips_ + strip.index * padded_depth_ / 2 * kPairStrip;
    float* const sums =
        blocks_.sums + (depths_.parts > 1 ? (strip.place * rows_.count + tiles_[t]) * kUnitColumns : 0);
    if constexpr (std::is_same_v<Out, float>) {
      if (columns == kUnitColumns && past_caches_ && kStreamsSums) {
        sum(i, t, b, sums, kUnitColumns, i > 0);
        if (last) stream_rows(c, ldc, sums, rows);
        return;
      }
      if (columns == kUnitColumns) return sum(i, t, b, c, ldc, add || i > 0, past_caches_);
      const auto bytes = static_cast<size_t>(columns) * sizeof(float);
      for (int64_t r = 0; add && i == 0 && r < rows; ++r)
        std::memcpy(sums + r * kUnitColumns, c + r * ldc, bytes);
      sum(i, t, b, sums, kUnitColumns, add || i > 0);
      for (int64_t r = 0; last && r < rows; ++r) std::memcpy(c + r * ldc, sums + r * kUnitColumns, bytes);
    } else {
      sum(i, t, b, sums, kUnitColumns, i > 0);
      if (last) Unit::store(c, ldc, sums, rows, columns, add);
    }
  }

  void sum(int64_t i, int64_t t, const float* b, float* c, int64_t ldc, bool onto,
           bool past_caches = false) const {
    const int64_t row = tiles_[t], rows = tiles_[t + 1] - row, begin = depths_[i].begin,
                  size = depths_[i].size();
    const bool tail = !rows_.transposed && begin + size > rows_.depth;
    const int64_t steps = size / kUnitDepth - (tail ? 1 : 0);
    const bf16* const a = rows_.transposed ? packed_rows(i) : rows_.a + begin;
    const int64_t lda = rows_.transposed ? packed_row_ : rows_.ld;
    const float* const part = b + begin / 2 * kPairStrip;
    if constexpr (Unit::kTakesStrips)
      if (rows_.transposed)
        return Unit::multiply_strip(rows, size / 2, a + row * size, part, c, ldc, onto, past_caches);
    if (steps > 0) Unit::multiply(rows, steps, a + row * lda, lda, part, c, ldc, onto);
    if (tail)
      Unit::multiply(rows, 1, blocks_.rows + row * kUnitDepth, kUnitDepth,
                     part + steps * kUnitDepth / 2 * kPairStrip, c, ldc, onto || steps > 0);
  }

  bf16* packed_rows(int64_t i) const { return blocks_.rows + i * padded(rows_.count) * packed_row_; }

  /// The rows of a whose depth runs along the rows of memory, block after block: in rows, or in strips, which
  /// need no transposing.
  void pack_columns() const {
    for (int64_t i = 0; i < depths_.parts; ++i) {
      const int64_t begin = depths_[i].begin, depth = std::min(depths_[i].end, rows_.depth) - begin,
                    units = depths_[i].size() / 2;
      float* const to = reinterpret_cast<float*>(packed_rows(i));
      const auto row = [this, begin](int64_t k) { return rows_.a + (begin + k) * rows_.ld; };
      if constexpr (Unit::kTakesStrips)
        pack_pairs(to, depth, units, rows_.count, row);
      else
        pack_pair_columns(to, packed_row_ / 2, depth, units, rows_.count, row);
    }
  }

  /// What rows have beyond a multiple of kUnitDepth.
  void pack_tails() const {
    const int64_t begin = rows_.depth / kUnitDepth * kUnitDepth;
    for (int64_t r = 0; r < rows_.count; ++r)
      pack_pair_row(reinterpret_cast<float*>(blocks_.rows + r * kUnitDepth), rows_.a + r * rows_.ld + begin,
                    rows_.depth - begin, kUnitDepth / 2);
  }

  Blocks blocks_;
  Rows rows_;
  const float* strips_;
  int64_t padded_depth_, packed_row_;
  Cut depths_;
  Tiles tiles_;
  bool past_caches_;
};

/// c (m, n) (= | +=) a b, b in strips; a (m, k), or stored as (k, m), with rows of memory lda apart.
template <class Unit, class Out>
void multiply_strips(const Product& p, const bf16* a, int64_t lda, const float* strips, Out* c, bool add,
                     bool past_caches, const Division& division, const Tensor& rows, const Tensor& sums) {
  std::atomic<int64_t> next{0};
  parallel_for(std::min<int64_t>(num_threads(), division.units()), 1, [&](int64_t first, int64_t last) {
    for (int64_t thread = first; thread < last; ++thread) {
      Unit::begin();
      const Blocks blocks{rows.rows(thread, 1).as<bf16>(), sums.rows(thread, 1).as<float>()};
      for (int64_t u = next.fetch_add(1); u < division.units(); u = next.fetch_add(1)) {
        const Cut::Part part = division.rows[u / division.strips.parts],
                        strip = division.strips[u % division.strips.parts];
        const Rows of{a + (p.a_transposed ? part.begin : part.begin * lda), lda, part.size(), p.k,
                      p.a_transposed};
        const UnitProduct<Unit, Out> product(blocks, of, strips, padded(p.k), past_caches);
        product.run(strip, p.n, c + part.begin * p.n, add);
      }
      Unit::end();
    }
  });
}

}  // namespace

void tile_pack(Context& ctx, int64_t k, int64_t n, bool transposed, const bf16* b, float* packed) {
  if (ctx.dry_run) return;
  const bool whole_lines = lies_in_lines(packed, kPairStrip);
  (whole_lines ? pack_all<true> : pack_all<false>)(packed, k, n, transposed, b, transposed ? k : n);
}

void tile_product(Context& ctx, const Product& p, const void* a, const void* b, void* c) {
  const bool packs = p.b != Layout::packed;
  // b is packed in parts where the sums are f32 and may wait in c.
  const int64_t depth = packs && p.out == DType::f32 ? std::min(p.k, kPackedDepth) : p.k;
  const Division division(p.m, ceil_div(p.n, kPairStrip), p.a_transposed);
  with_tile_unit([&](auto unit) {
    using Unit = decltype(unit);
    const int64_t row = p.a_transposed
                            ? ceil_div(padded(depth), Unit::kDepthBlock) * packed_row<Unit>(padded(depth))
                            : kUnitDepth;
    ScratchScope t(ctx.scratch);
    const Tensor packed =
                     packs ? t.alloc("b in strips", DType::u8, {tile_packed_bytes(depth, p.n)}) : Tensor(),
                 rows = t.alloc("rows of a", DType::bf16, {num_threads(), division.rows.size * row}),
                 sums = t.alloc("sums of strips", DType::f32,
                                {num_threads(), strips_together<Unit>(division.rows.size, padded(depth)) *
                                                    division.rows.size * kUnitColumns});
    if (ctx.dry_run) return;
    if (p.k == 0) {
      if (!p.accumulate)
        std::memset(c, 0, static_cast<size_t>(p.m * p.n) * static_cast<size_t>(dtype_size(p.out)));
      return;
    }
    const bool b_transposed = p.b == Layout::transposed;
    const int64_t lda = p.a_transposed ? p.m : p.k, ldb = b_transposed ? p.k : p.n;
    for (int64_t k = 0; k < p.k; k += depth) {
      Product part = p;
      part.k = std::min(depth, p.k - k);
      const float* strips = static_cast<const float*>(packs ? packed.data : b);
      if (packs) {
        pack_all<false>(static_cast<float*>(packed.data), part.k, p.n, b_transposed,
                        static_cast<const bf16*>(b) + (b_transposed ? k : k * ldb), ldb);
      }
      const bf16* const from = static_cast<const bf16*>(a) + (p.a_transposed ? k * lda : k);
      const bool add = p.accumulate || k > 0;
      // A weight's gradient, which no one reads before the whole gradient is complete.
      const bool past_caches = p.a_transposed && !p.accumulate && p.k == depth && p.out == DType::f32 &&
                               lies_in_lines(static_cast<const float*>(c), p.n);
      if (p.out == DType::f32)
        multiply_strips<Unit>(part, from, lda, strips, static_cast<float*>(c), add, past_caches, division,
                              rows, sums);
      else
        multiply_strips<Unit>(part, from, lda, strips, static_cast<bf16*>(c), add, false, division, rows,
                              sums);
    }
  });
}

#include "ops/cpu/isa_end.h"
