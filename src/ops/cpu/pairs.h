// Operands of bf16 as pairs: the elements 2u and 2u + 1 along the depth of a product lie side by side in the
// 32 bits of a float, as AVX512-BF16 and AMX multiply them. Elements beyond the depth are zero. Include
// between isa_begin.h and isa_end.h, after vectors.h.

namespace {

/// Columns of a strip of pairs: two vectors of AVX-512, or two tiles of AMX.
constexpr int64_t kPairStrip = 32;
/// How many rows ahead of those being packed are prefetched: rows lie far apart, often in other pages.
constexpr int64_t kRowsAhead = 16;

/// low and high as one pair; high may be null.
inline float pair_of(const bf16* low, const bf16* high) {
  return std::bit_cast<float>(static_cast<uint32_t>(low->bits) |
                              (high ? static_cast<uint32_t>(high->bits) << 16 : 0u));
}

/// A vector of pairs (low[i], high[i]); high may be null.
inline Vec<float> pairs_of(const bf16* low, const bf16* high) {
  const WordVec l = reinterpret_cast<WordVec>(load_vec(low)) >> 16,
                h = high ? reinterpret_cast<WordVec>(load_vec(high)) : WordVec{};
  return reinterpret_cast<Vec<float>>(l | h);
}

/// A vector of a packed operand; with kPastCaches to is aligned to one, as it is in those below.
template <bool kPastCaches>
void store_pairs(float* to, Vec<float> pairs) {
  if constexpr (kPastCaches)
    store_past_caches(to, pairs);
  else
    store_vec(to, pairs);
}

/// to[i] = (low[i], high[i]) for i < n, zero for n <= i < room; high may be null.
template <bool kPastCaches = false>
inline void interleave(float* to, const bf16* low, const bf16* high, int64_t n, int64_t room) {
  constexpr int64_t W = Simd<float>::kWidth;
  int64_t i = 0;
  for (; i + W <= n; i += W) store_pairs<kPastCaches>(to + i, pairs_of(low + i, high ? high + i : nullptr));
  for (; i < n; ++i) to[i] = pair_of(low + i, high ? high + i : nullptr);
  for (; i < room; ++i) to[i] = 0;
}

/// Strips of a block whose rows run along the columns: to[strip][u][column], `units` >= depth / 2 of them in
/// a strip. row(k): row k of the block, k < depth.
template <bool kPastCaches = false, class Row>
void pack_pairs(float* to, int64_t depth, int64_t units, int64_t columns, Row&& row) {
  constexpr int64_t S = kPairStrip;
  for (int64_t u = 0; u < units; ++u) {
    float* out = to + u * S;
    const int64_t ahead = 2 * u + kRowsAhead;
    for (int64_t c = 0; c < columns; c += S, out += units * S) {
      if (ahead + 1 < depth) {
        __builtin_prefetch(row(ahead) + c);
        __builtin_prefetch(row(ahead + 1) + c);
      }
      if (2 * u >= depth) {
        std::fill_n(out, S, 0.0f);
        continue;
      }
      interleave<kPastCaches>(out, row(2 * u) + c, 2 * u + 1 < depth ? row(2 * u + 1) + c : nullptr,
                              std::min(columns - c, S), S);
    }
  }
}

/// The same of a block stored as its transpose: column(c) is the depth of column c.
template <bool kPastCaches = false, class Column>
[[gnu::noinline]] void pack_pairs_transposed(float* to, int64_t depth, int64_t units, int64_t columns,
                                             const Column& column) {
  constexpr int64_t W = Simd<float>::kWidth, S = kPairStrip;
  for (int64_t c = 0; c < ceil_div(columns, S) * S; c += W) {
    float* const strip = to + c / S * units * S + c % S;
    int64_t u = 0;
    if (c + W <= columns)
      for (; 2 * (u + W) <= depth; u += W) {
        Vec<float> r[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) r[i] = load_vec(reinterpret_cast<const float*>(column(c + i) + 2 * u));
        transpose<float>(r);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store_pairs<kPastCaches>(strip + (u + i) * S, r[i]);
      }
    if (kMaskedParts && c + W <= columns && 2 * u < depth && depth % 2 == 0) {
      Vec<float> r[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i)
        r[i] = load_part(reinterpret_cast<const float*>(column(c + i) + 2 * u), depth / 2 - u);
      transpose<float>(r);
      for (int i = 0; i < W && u < units; ++i, ++u) store_vec(strip + u * S, r[i]);
    }
    for (; u < units; ++u)
      for (int64_t i = 0; i < W; ++i) {
        float& pair = strip[u * S + i];
        pair = 0;
        if (c + i >= columns || 2 * u >= depth) continue;
        const bf16* const low = column(c + i) + 2 * u;
        pair = pair_of(low, 2 * u + 1 < depth ? low + 1 : nullptr);
      }
  }
}

/// A row of a block whose rows run along the depth: to[u], u < units.
inline void pack_pair_row(float* to, const bf16* from, int64_t depth, int64_t units) {
  std::fill(to + depth / 2, to + units, 0.0f);
  std::memcpy(to, from, static_cast<size_t>(depth) * sizeof(bf16));
}

/// Rows of pairs along the depth of a block whose rows run along its columns: to[column * ld + u]. row(k):
/// row k of the block, k < depth.
template <class Row>
void pack_pair_columns(float* to, int64_t ld, int64_t depth, int64_t units, int64_t columns, Row&& row) {
  constexpr int64_t W = Simd<float>::kWidth;
  for (int64_t u = 0; u < units; u += W) {
    const int64_t n = std::min(W, units - u);
    int64_t c = 0;
    if (n == W && 2 * (u + W) <= depth)
      for (; c + W <= columns; c += W) {
        Vec<float> r[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) r[i] = pairs_of(row(2 * (u + i)) + c, row(2 * (u + i) + 1) + c);
        transpose<float>(r);
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store_vec(to + (c + i) * ld + u, r[i]);
      }
    for (; c < columns; ++c)
      for (int64_t i = 0; i < n; ++i) {
        const int64_t k = 2 * (u + i);
        to[c * ld + u + i] = k < depth ? pair_of(row(k) + c, k + 1 < depth ? row(k + 1) + c : nullptr) : 0;
      }
  }
}

}  // namespace
