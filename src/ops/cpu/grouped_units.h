// How grouped products hold the elements of their blocks (grouped_tiles.h): widened to the type of the sums,
// or as pairs of bf16 (pairs.h) for processors that multiply those, by vectors (AVX512-BF16: a lane adds two
// products, at twice the rate of f32) or by tiles (AMX). Depth is counted in elements here, and in lanes of
// kUnit elements by the tiles; units(depth) lanes hold a depth. Include after grouped_tiles.h, pairs.h and
// tile_units.h.

namespace {

/// The operand dy of a weight's gradient, whose rows run along the columns of the product: tile after tile,
/// each with kTileStride lanes of a unit side by side.
template <class E>
struct ColumnTiles {
  using A = typename E::A;

  /// Packs `units` units. row(k): the row k < depth of the block, from its first column.
  template <class Row>
  static void pack(A* to, int64_t depth, int64_t units, int64_t columns, const Tiles& tiles, Row&& row) {
    for (int64_t u = 0; u < units; ++u)
      for (int64_t j = 0; j < tiles.count; ++j)
        E::tile_rows(to + (j * units + u) * kTileStride, u, depth, columns - tiles[j],
                     [&](int64_t k) { return row(k) + tiles[j]; });
  }
  /// The product of tile j with a strip; past_caches: as in tile_units.h.
  static void multiply(const A* packed, int64_t units, const Tiles& tiles, int64_t j, const A* b, A* c,
                       int64_t ldc, bool add, bool past_caches = false) {
    E::template tile<1, kTileStride>(tiles[j + 1] - tiles[j], units, packed + j * units * kTileStride, b, c,
                                     ldc, add, past_caches);
  }
};

template <class T>
struct Singles {
  using Storage = T;
  using A = accumulate_t<T>;
  static constexpr int64_t kUnit = 1, kStripWidth = kStrip<A>;

  static constexpr int64_t units(int64_t depth) { return depth; }
  static Tiles tiles(int64_t rows) { return {rows, kTileHeight, 1}; }
  static void begin() {}
  static void end() {}
  static void row(A* to, const T* from, int64_t n) { widen_row(to, from, n); }
  /// row(k): row k of the block.
  template <class Row>
  static void strips(A* to, int64_t depth, int64_t columns, Row&& row) {
    pack_strips<T>(to, depth, columns, row);
  }
  static void strips_transposed(A* to, int64_t depth, int64_t columns, const T* from, int64_t ld) {
    pack_strips_transposed(to, depth, columns, from, ld);
  }
  /// A tile's part of unit `u`: of kUnit rows, in each of which `readable` elements may be read.
  template <class Row>
  static void tile_rows(A* to, int64_t u, int64_t /*depth*/, int64_t readable, Row&& row) {
    widen_tile(to, row(u), readable);
  }
  template <int AI, int AK>
  static void tile(int64_t rows, int64_t units, const A* a, const A* b, A* c, int64_t ldc, bool add,
                   bool /*past_caches*/ = false) {
    tile_of<A, AI, AK>(rows, units, a, b, c, ldc, add);
  }
  using Columns = ColumnTiles<Singles>;
};

/// bf16 in pairs, the depth padded with zeros to a multiple of kDepth.
template <int64_t kDepth>
struct PackedPairs {
  using Storage = bf16;
  using A = float;
  static constexpr int64_t kUnit = 2, kStripWidth = kPairStrip;

  static constexpr int64_t units(int64_t depth) { return ceil_div(depth, kDepth) * kDepth / 2; }
  static void row(float* to, const bf16* from, int64_t n) { pack_pair_row(to, from, n, units(n)); }
  template <class Row>
  static void strips(float* to, int64_t depth, int64_t columns, Row&& row) {
    pack_pairs(to, depth, units(depth), columns, row);
  }
  static void strips_transposed(float* to, int64_t depth, int64_t columns, const bf16* from, int64_t ld) {
    pack_pairs_transposed(to, depth, units(depth), columns, [=](int64_t c) { return from + c * ld; });
  }
};

#if defined(SLUICE_ISA_avx512)

/// Pairs that vectors multiply. Unlike tiles they take dy as its rows lie, without a transposed copy.
struct Pairs : PackedPairs<2> {
  static Tiles tiles(int64_t rows) { return {rows, Avx512Bf16Unit::kMostRows, 1}; }
  static void begin() {}
  static void end() { Avx512Bf16Unit::end(); }
  template <class Row>
  static void tile_rows(float* to, int64_t u, int64_t depth, int64_t readable, Row&& row) {
    const int64_t n = std::min<int64_t>(readable, kTileStride);
    interleave(to, row(2 * u), 2 * u + 1 < depth ? row(2 * u + 1) : nullptr, n, n);
  }
  template <int AI, int AK>
  static void tile(int64_t rows, int64_t units, const float* a, const float* b, float* c, int64_t ldc,
                   bool add, bool past_caches = false) {
    Avx512Bf16Unit::tile<AK>(rows, units, reinterpret_cast<const bf16*>(a), 2 * AI, b, c, ldc, add,
                             past_caches);
  }
  using Columns = ColumnTiles<Pairs>;
};

#endif

/// Pairs that a unit for tiles multiplies, 32 rows at a time.
template <class Unit>
struct TilePairs : PackedPairs<kUnitDepth> {
  static Tiles tiles(int64_t rows) { return {rows, kUnitRows, kUnitRows}; }
  static void begin() { Unit::begin(); }
  static void end() { Unit::end(); }
  template <int AI, int AK>
  static void tile(int64_t rows, int64_t units, const float* a, const float* b, float* c, int64_t ldc,
                   bool add) {
    static_assert(AK == 1);
    Unit::multiply(rows, units * 2 / kUnitDepth, reinterpret_cast<const bf16*>(a), 2 * AI, b, c, ldc, add);
  }

  /// dy is transposed: a tile's rows run along the depth.
  struct Columns {
    template <class Row>
    static void pack(float* to, int64_t depth, int64_t units, int64_t columns, const Tiles&, Row&& row) {
      pack_pair_columns(to, kRowStride, depth, units, columns, row);
    }
    static void multiply(const float* packed, int64_t units, const Tiles& tiles, int64_t j, const float* b,
                         float* c, int64_t ldc, bool add, bool past_caches = false) {
      const int64_t rows = tiles[j + 1] - tiles[j];
      const float* const a = packed + tiles[j] * kRowStride;
      if (!past_caches) return tile<kRowStride, 1>(rows, units, a, b, c, ldc, add);
      alignas(64) float sums[kUnitRows * kUnitColumns];  // a unit's own stores are kept in the caches
      tile<kRowStride, 1>(rows, units, a, b, sums, kUnitColumns, false);
      stream_rows(c, ldc, sums, rows);
    }
  };
};

/// Calls f with the form of elements for this storage type and processor.
template <class F>
void with_elements(DType storage, F&& f) {
#if defined(SLUICE_ISA_avx512)
  if (storage == DType::bf16 && bf16_unit() == Bf16Unit::avx512_bf16) return f(Pairs{});
#endif
  if (storage == DType::bf16 && bf16_products())
    return with_tile_unit([&](auto unit) { f(TilePairs<decltype(unit)>{}); });
  with_storage_type(storage, [&](auto tag) { f(Singles<decltype(tag)>{}); });
}

}  // namespace
