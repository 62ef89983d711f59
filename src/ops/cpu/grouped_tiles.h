// Products of packed blocks in the caches, for grouped matrix products: a register tile and the packing of
// its operands. Include between isa_begin.h and isa_end.h, after vectors.h.
//
// A block is at most kBlockRows x kBlockDepth on the side whose elements are broadcast, and kBlockDepth deep
// on the side that lies in vectors. Strips on that side are two vectors wide.

namespace {

#if defined(SLUICE_ISA_avx512)
constexpr int kTileHeight = 14, kTileStride = 16;  // 14 x 2 accumulators of 32 registers
#else
constexpr int kTileHeight = 6, kTileStride = 8;  // 6 x 2 of 16
#endif

constexpr int64_t kBlockRows = 512, kBlockDepth = 256, kBlockColumns = 256;
constexpr int64_t kRowStride =
    kBlockDepth + 16;  // not a power of two: rows of a tile do not fall on a few cache sets

template <class A>
constexpr int64_t kStrip = 2 * Simd<A>::kWidth;

/// Divides n into the fewest parts of at most `most`, as equal as multiples of `unit` allow; the last may be
/// shorter.
struct Cut {
  int64_t n, size, parts;
  Cut(int64_t n_, int64_t most, int64_t unit)
      : n(n_),
        size(ceil_div(ceil_div(n, std::max<int64_t>(1, ceil_div(n, most))), unit) * unit),
        parts(n > 0 ? ceil_div(n, size) : 0) {}
  struct Part {
    int64_t begin, end;
    int64_t size() const { return end - begin; }
  };
  Part operator[](int64_t i) const { return {size * i, std::min(n, size * (i + 1))}; }
};

/// Begins of tiles of `rows` <= kBlockRows rows: the fewest of at most `height`, as equal as multiples of
/// `unit` allow.
struct Tiles {
  int64_t count;
  std::array<int32_t, kBlockRows / 6 + 2> begin;
  Tiles(int64_t rows, int64_t height, int64_t unit) : count(ceil_div(rows, height)) {
    for (int64_t i = 0; i <= count; ++i)
      begin[static_cast<size_t>(i)] =
          static_cast<int32_t>(std::min(rows, unit * (ceil_div(rows, unit) * i / count)));
  }
  int64_t operator[](int64_t i) const { return begin[static_cast<size_t>(i)]; }
};

/// Whether rows of c, ld elements apart, begin where lines of the caches do.
template <class A>
inline bool lies_in_lines(const A* c, int64_t ld) {
  constexpr int64_t kLine = 64;
  return reinterpret_cast<uintptr_t>(c) % kLine == 0 && ld * static_cast<int64_t>(sizeof(A)) % kLine == 0;
}

/// c[i][.] (= | +=) sum over k of a[i AI + k AK] b[k][.], M rows and one strip. The sum runs in the order of
/// k in one accumulator for each element: a value does not depend on the tile it fell in.
template <class A, int M, int AI, int AK>
[[gnu::noinline]] void tile(int64_t depth, const A* a, const A* b, A* c, int64_t ldc, bool add) {
  constexpr int W = Simd<A>::kWidth;
  Vec<A> s[M][2];
#pragma GCC unroll 14
  for (int i = 0; i < M; ++i) s[i][0] = s[i][1] = Vec<A>{};
  const auto advance = [&](int64_t steps) __attribute__((always_inline)) {
    for (int64_t k = 0; k < steps; ++k, a += AK, b += kStrip<A>) {
      const Vec<A> b0 = load_vec(b), b1 = load_vec(b + W);
#pragma GCC unroll 14
      for (int i = 0; i < M; ++i) {
        const Vec<A> x = splat(a[i * AI]);
        s[i][0] += x * b0;
        s[i][1] += x * b1;
      }
    }
  };
  // Data needed at the end is prefetched step by step.
  const int64_t pace = depth / (2 * M);
  for (int i = 0; i < M; ++i) {
    __builtin_prefetch(c + i * ldc, 1);
    __builtin_prefetch(c + i * ldc + kStrip<A> - 1, 1);
    advance(pace);
  }
  advance(depth - pace * M);
#pragma GCC unroll 14
  for (int i = 0; i < M; ++i) {
    A* to = c + i * ldc;
    store_vec(to, add ? load_vec(to) + s[i][0] : s[i][0]);
    store_vec(to + W, add ? load_vec(to + W) + s[i][1] : s[i][1]);
  }
}

/// The same for 1 to M rows.
template <class A, int AI, int AK, int M = kTileHeight>
inline void tile_of(int64_t rows, int64_t depth, const A* a, const A* b, A* c, int64_t ldc, bool add) {
  if (rows == M) return tile<A, M, AI, AK>(depth, a, b, c, ldc, add);
  if constexpr (M > 1) tile_of<A, AI, AK, M - 1>(rows, depth, a, b, c, ldc, add);
}

/// to = from widened.
template <class T, class A>
inline void widen_row(A* to, const T* from, int64_t n) {
  constexpr int W = Simd<A>::kWidth;
  int64_t i = 0;
  for (; i + W <= n; i += W) store_vec(to + i, load_vec(from + i));
  for (; i < n; ++i) to[i] = load(from + i);
}

/// Elements of a tile, to[0, kTileStride) = from, of which `readable` may be read; a tile needs no more.
template <class T, class A>
inline void widen_tile(A* to, const T* from, int64_t readable) {
  constexpr int W = Simd<A>::kWidth;
  if (readable < kTileStride) return widen_row(to, from, readable);
  for (int i = 0; i < kTileStride; i += W) store_vec(to + i, load_vec(from + i));
}

/// Strips of a block stored with rows of vectors: to[strip][k][.] = from[k][column], zero beyond the columns.
/// rows of `from` are given by row(k).
template <class T, class A, class Row>
inline void pack_strips(A* to, int64_t depth, int64_t columns, Row&& row) {
  const int64_t step = depth * kStrip<A>;
  for (int64_t k = 0; k < depth; ++k) {
    const T* from = row(k);
    A* out = to + k * kStrip<A>;
    int64_t c = 0;
    for (; c + kStrip<A> <= columns; c += kStrip<A>, out += step) {
      store_vec(out, load_vec(from + c));
      store_vec(out + Simd<A>::kWidth, load_vec(from + c + Simd<A>::kWidth));
    }
    if (c < columns)
      for (int64_t i = 0; i < kStrip<A>; ++i) out[i] = c + i < columns ? load(from + c + i) : A(0);
  }
}

/// The same of a block stored as its transpose, rows of depth elements ld apart: to[strip][k][.] =
/// from[column][k].
template <class T, class A>
[[gnu::noinline]] void pack_strips_transposed(A* to, int64_t depth, int64_t columns, const T* from,
                                              int64_t ld) {
  constexpr int W = Simd<A>::kWidth;
  const int64_t step = depth * kStrip<A>;
  for (int64_t c = 0; c < columns; c += W) {
    A* strip = to + c / kStrip<A> * step + c % kStrip<A>;
    const int64_t n = std::min<int64_t>(W, columns - c);
    int64_t k = 0;
    if (n == W)
      for (; k + W <= depth; k += W) {
        Vec<A> r[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) r[i] = load_vec(from + (c + i) * ld + k);
        transpose<A>(r);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store_vec(strip + (k + i) * kStrip<A>, r[i]);
      }
    for (; k < depth; ++k)
      for (int64_t i = 0; i < W; ++i) strip[k * kStrip<A> + i] = i < n ? load(from + (c + i) * ld + k) : A(0);
  }
  if (columns % kStrip < A >> 0 && columns % kStrip<A> <= W) {  // the last strip's second vector
    A* strip = to + columns / kStrip<A> * step + W;
    for (int64_t k = 0; k < depth; ++k) store_vec(strip + k * kStrip<A>, Vec<A>{});
  }
}

}  // namespace
