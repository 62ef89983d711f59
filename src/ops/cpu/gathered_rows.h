// Products of a few heads with rows that lie anywhere in memory, for attention over selected keys. Include
// between isa_begin.h and isa_end.h, after vectors.h. Every result is summed in an order that depends on the
// sizes of the one product alone, not on where in a tile, or in a part of a list, it falls.

namespace {

constexpr int64_t padded(int64_t n, int64_t width) { return (n + width - 1) / width * width; }

/// The rows of a table that a list names.
template <class T>
struct Rows {
  T* base;
  const int32_t* list;
  int64_t stride;
  T* operator[](int64_t e) const { return base + list[e] * stride; }
  Rows from(int64_t e) const { return {base, list + e, stride}; }
};

/// Rows this far ahead in a list are asked for: where they lie in memory, hardware cannot foresee.
constexpr int64_t kAhead = 12;

/// dot_rows in tiles of H heads and W / H rows.
template <int H, class A, class T>
void dot_tiles(A* out, int64_t ldo, const A* q, int64_t ldq, int64_t heads, const Rows<const T>& rows,
               int64_t n, int64_t depth) {
  constexpr int W = Simd<A>::kWidth, E = W / H;
  for (int64_t e0 = 0; e0 < n; e0 += E) {
    const T* row[E];
    for (int e = 0; e < E; ++e) row[e] = rows[std::min<int64_t>(e0 + e, n - 1)];
    for (int64_t e = e0 + kAhead; e < std::min(e0 + kAhead + E, n); ++e) prefetch_row(rows[e], depth);
    for (int64_t h0 = 0; h0 < heads; h0 += H) {
      const A* head[H];
      for (int h = 0; h < H; ++h) head[h] = q + std::min<int64_t>(h0 + h, heads - 1) * ldq;
      Vec<A> s[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) s[i] = Vec<A>{};
      int64_t d = 0;
      for (; d + W <= depth; d += W) {
        Vec<A> x[H];
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) x[h] = load_vec(head[h] + d);
#pragma GCC unroll 16
        for (int e = 0; e < E; ++e) {
          const Vec<A> k = load_vec(row[e] + d);
#pragma GCC unroll 4
          for (int h = 0; h < H; ++h) s[h * E + e] += x[h] * k;
        }
      }
      alignas(64) A sums[W];
      *reinterpret_cast<Vec<A>*>(sums) = sums_of<A>(s);
      if (d == depth && h0 + H <= heads && e0 + E <= n) {
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) std::copy_n(sums + h * E, E, out + (h0 + h) * ldo + e0);
        continue;
      }
      for (int64_t h = 0; h < std::min<int64_t>(H, heads - h0); ++h)
        for (int64_t e = 0; e < std::min<int64_t>(E, n - e0); ++e) {
          A x = sums[h * E + e];
          for (int64_t c = d; c < depth; ++c) x += head[h][c] * load(row[e] + c);
          out[(h0 + h) * ldo + e0 + e] = x;
        }
    }
  }
}

/// out[h][e] = <q_h, rows_e> for `heads` rows of q, which are ldq apart, and n rows; out rows are ldo apart.
/// One or two heads have tiles of their own, in which nothing is computed twice.
template <class A, class T>
void dot_rows(A* out, int64_t ldo, const A* q, int64_t ldq, int64_t heads, const Rows<const T>& rows,
              int64_t n, int64_t depth) {
  constexpr int W = Simd<A>::kWidth, most = W < 4 ? 1 : W / 4;
  if constexpr (most > 1)
    if (heads == 1) return dot_tiles<1>(out, ldo, q, ldq, heads, rows, n, depth);
  if constexpr (most > 2)
    if (heads == 2) return dot_tiles<2>(out, ldo, q, ldq, heads, rows, n, depth);
  dot_tiles<most>(out, ldo, q, ldq, heads, rows, n, depth);
}

template <class A, class T, int M, int NV>
inline void mix_tile(A* y, int64_t ldy, const A* p, int64_t ldp, const Rows<const T>& rows, int64_t n,
                     int64_t d) {
  constexpr int W = Simd<A>::kWidth;
  Vec<A> s[M][NV];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) s[m][v] = load_vec(y + m * ldy + d + v * W);
  for (int64_t e = 0; e < n; ++e) {
    if (e + kAhead < n) prefetch_row(rows[e + kAhead] + d, NV * W);
    Vec<A> x[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) x[v] = load_vec(rows[e] + d + v * W);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const Vec<A> a = splat(p[m * ldp + e]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) s[m][v] += a * x[v];
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store_vec(y + m * ldy + d + v * W, s[m][v]);
}

template <class A, class T, int M>
inline void mix_heads(A* y, int64_t ldy, const A* p, int64_t ldp, int64_t heads, const Rows<const T>& rows,
                      int64_t n, int64_t depth) {
  constexpr int W = Simd<A>::kWidth;
  int64_t h = 0;
  for (; h + M <= heads; h += M) {
    int64_t d = 0;
    for (; d + 4 * W <= depth; d += 4 * W)
      mix_tile<A, T, M, 4>(y + h * ldy, ldy, p + h * ldp, ldp, rows, n, d);
    for (; d + W <= depth; d += W) mix_tile<A, T, M, 1>(y + h * ldy, ldy, p + h * ldp, ldp, rows, n, d);
    for (; d < depth; ++d)
      for (int64_t m = h; m < h + M; ++m) {
        A x = y[m * ldy + d];
        for (int64_t e = 0; e < n; ++e) x += p[m * ldp + e] * load(rows[e] + d);
        y[m * ldy + d] = x;
      }
  }
  if constexpr (M > 1)
    if (h < heads) mix_heads<A, T, M / 2>(y + h * ldy, ldy, p + h * ldp, ldp, heads - h, rows, n, depth);
}

/// y[h][d] += sum_e p[h][e] rows_e[d], in the order of e.
template <class A, class T>
void mix_rows(A* y, int64_t ldy, const A* p, int64_t ldp, int64_t heads, const Rows<const T>& rows, int64_t n,
              int64_t depth) {
  mix_heads<A, T, Simd<A>::kWidth * sizeof(A) == 64 ? 4 : 2>(y, ldy, p, ldp, heads, rows, n, depth);
}

template <class A, int M, int NV>
inline void scatter_tile(const Rows<A>& rows, const A* c, int64_t ldc, const A* x, int64_t ldx, int64_t n,
                         int64_t d) {
  constexpr int W = Simd<A>::kWidth;
  Vec<A> xs[M][NV];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) xs[m][v] = load_vec(x + m * ldx + d + v * W);
  for (int64_t e = 0; e < n; ++e) {
    if (e + kAhead < n) prefetch_row(rows[e + kAhead] + d, NV * W);
    A* const y = rows[e] + d;
    Vec<A> s[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) s[v] = load_vec(y + v * W);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const Vec<A> a = splat(c[m * ldc + e]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) s[v] += a * xs[m][v];
    }
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store_vec(y + v * W, s[v]);
  }
}

template <class A, int M>
inline void scatter_heads(const Rows<A>& rows, const A* c, int64_t ldc, const A* x, int64_t ldx,
                          int64_t heads, int64_t n, int64_t depth) {
  constexpr int W = Simd<A>::kWidth;
  int64_t h = 0;
  for (; h + M <= heads; h += M) {
    int64_t d = 0;
    for (; d + 4 * W <= depth; d += 4 * W)
      scatter_tile<A, M, 4>(rows, c + h * ldc, ldc, x + h * ldx, ldx, n, d);
    for (; d + W <= depth; d += W) scatter_tile<A, M, 1>(rows, c + h * ldc, ldc, x + h * ldx, ldx, n, d);
    for (; d < depth; ++d)
      for (int64_t e = 0; e < n; ++e)
        for (int64_t m = h; m < h + M; ++m) rows[e][d] += c[m * ldc + e] * x[m * ldx + d];
  }
  if constexpr (M > 1)
    if (h < heads) scatter_heads<A, M / 2>(rows, c + h * ldc, ldc, x + h * ldx, ldx, heads - h, n, depth);
}

/// rows_e[d] += sum_h c[h][e] x[h][d], in the order of h. No row is named twice.
template <class A>
void scatter_rows(const Rows<A>& rows, const A* c, int64_t ldc, const A* x, int64_t ldx, int64_t heads,
                  int64_t n, int64_t depth) {
  scatter_heads<A, Simd<A>::kWidth * sizeof(A) == 64 ? 4 : 2>(rows, c, ldc, x, ldx, heads, n, depth);
}

template <class A>
inline A largest_of(const A* x, int64_t n) {
  constexpr int W = Simd<A>::kWidth;
  A top = x[0];
  int64_t e = 0;
  if (n >= W) {
    Vec<A> most = load_vec(x);
    for (e = W; e + W <= n; e += W) {
      const Vec<A> y = load_vec(x + e);
      most = y > most ? y : most;
    }
    for (int i = 0; i < W; ++i) top = std::max(top, most[i]);
  }
  for (; e < n; ++e) top = std::max(top, x[e]);
  return top;
}

/// x[e] = exp(x[e] - shift) for e < n, and their sum. x has room up to a multiple of the vector width.
template <class A>
inline A exp_row(A* x, int64_t n, A shift) {
  constexpr int W = Simd<A>::kWidth;
  for (int64_t e = n; e < padded(n, W); ++e) x[e] = std::numeric_limits<A>::lowest() / 2;
  Vec<A> sum{};
  for (int64_t e = 0; e < n; e += W) {
    const Vec<A> y = exp_vec(load_vec(x + e) - shift);
    store_vec(x + e, y);
    sum += y;
  }
  return sum_lanes<A>(sum);
}

/// The tokens of a query's blocks, in ascending order; returns their number.
inline int64_t expand_blocks(int32_t* tokens, const int32_t* first, int64_t count, int64_t block,
                             int64_t last) {
  if (block == 1) {
    std::copy_n(first, count, tokens);
    return count;
  }
  int64_t n = 0;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t s = first[i]; s <= std::min<int64_t>(first[i] + block - 1, last); ++s)
      tokens[n++] = static_cast<int32_t>(s);
  return n;
}

/// Queries are taken in blocks, and their keys in ranges of neighbours, so that a range is read from memory
/// once for all queries of a block: of 1 MB, but not so few that a query has only a handful of keys in it.
template <class T>
int64_t rows_per_range(int64_t keys, int64_t most, int64_t depth) {
  const int64_t cached = (int64_t{1} << 20) / (depth * static_cast<int64_t>(sizeof(T)));
  return std::max(cached, 16 * keys / most);
}

}  // namespace
