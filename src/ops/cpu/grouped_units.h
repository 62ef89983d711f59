// How grouped products hold the elements of their blocks (grouped_tiles.h): widened to the type of the sums,
// or as pairs of bf16 for processors that multiply those (AVX512-BF16: a lane adds two products, at twice the
// rate of f32). Depth is counted in elements here, and in lanes of kUnit elements by the tiles. Include after
// grouped_tiles.h.

namespace {

template <class T>
struct Singles {
  using Storage = T;
  using A = accumulate_t<T>;
  static constexpr int64_t kUnit = 1;

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
  static void tile(int64_t rows, int64_t units, const A* a, const A* b, A* c, int64_t ldc, bool add) {
    tile_of<A, AI, AK>(rows, units, a, b, c, ldc, add);
  }
};

#if defined(SLUICE_ISA_avx512) && !defined(__clang__)

/// As tile(), of pairs: c[i][.] (= | +=) the sum of both products of every pair.
template <int M, int AI, int AK>
[[gnu::noinline]] __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,avx512bf16"))) void
pair_tile(int64_t units, const float* a, const float* b, float* c, int64_t ldc, bool add) {
  typedef int32_t Words __attribute__((vector_size(64), may_alias));
  typedef int16_t Halves __attribute__((vector_size(64), may_alias));
  typedef Words UnalignedWords __attribute__((aligned(4)));
  typedef float Sums __attribute__((vector_size(64)));
  typedef float UnalignedSums __attribute__((vector_size(64), aligned(4), may_alias));
  typedef int32_t Word __attribute__((may_alias));
  Sums s[M][2];
#pragma GCC unroll 14
  for (int i = 0; i < M; ++i) s[i][0] = s[i][1] = Sums{};
  for (int64_t k = 0; k < units; ++k, a += AK, b += 32) {
    const auto b0 = reinterpret_cast<Halves>(Words(*reinterpret_cast<const UnalignedWords*>(b))),
               b1 = reinterpret_cast<Halves>(Words(*reinterpret_cast<const UnalignedWords*>(b + 16)));
#pragma GCC unroll 14
    for (int i = 0; i < M; ++i) {
      const auto x = reinterpret_cast<Halves>(Words{} + *reinterpret_cast<const Word*>(a + i * AI));
      s[i][0] = __builtin_ia32_dpbf16ps_v16sf(s[i][0], x, b0);
      s[i][1] = __builtin_ia32_dpbf16ps_v16sf(s[i][1], x, b1);
    }
  }
#pragma GCC unroll 14
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      UnalignedSums* const to =
          reinterpret_cast<UnalignedSums*>(c + i * ldc + v * 16);  // auto would align it
      *to = add ? *to + s[i][v] : s[i][v];
    }
}

struct Pairs {
  using Storage = bf16;
  using A = float;
  static constexpr int64_t kUnit = 2;

  static void row(float* to, const bf16* from, int64_t n) {
    if (n % 2 == 1) to[n / 2] = 0;
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(bf16));
  }
  template <class Row>
  static void strips(float* to, int64_t depth, int64_t columns, Row&& row) {
    const int64_t step = ceil_div(depth, 2) * kStrip<float>;
    for (int64_t k = 0; k < depth; k += 2) {
      float* out = to + k / 2 * kStrip<float>;
      for (int64_t c = 0; c < columns; c += kStrip<float>, out += step)
        interleave(out, row(k) + c, k + 1 < depth ? row(k + 1) + c : nullptr,
                   std::min(columns - c, kStrip<float>), kStrip<float>);
    }
  }
  [[gnu::noinline]] static void strips_transposed(float* to, int64_t depth, int64_t columns, const bf16* from,
                                                  int64_t ld) {
    constexpr int64_t W = Simd<float>::kWidth, S = kStrip<float>;
    const int64_t units = ceil_div(depth, 2);
    for (int64_t c = 0; c < ceil_div(columns, S) * S; c += W) {
      float* const strip = to + c / S * units * S + c % S;
      int64_t u = 0;
      if (c + W <= columns)
        for (; 2 * (u + W) <= depth; u += W) {
          Vec<float> r[W];
#pragma GCC unroll 16
          for (int i = 0; i < W; ++i)
            r[i] = load_vec(reinterpret_cast<const float*>(from + (c + i) * ld + 2 * u));
          transpose<float>(r);
#pragma GCC unroll 16
          for (int i = 0; i < W; ++i) store_vec(strip + (u + i) * S, r[i]);
        }
      for (; u < units; ++u)
        for (int64_t i = 0; i < W; ++i) {
          const bf16* const low = from + (c + i) * ld + 2 * u;
          strip[u * S + i] = c + i < columns ? pair(low, 2 * u + 1 < depth ? low + 1 : nullptr) : 0;
        }
    }
  }
  template <class Row>
  static void tile_rows(float* to, int64_t u, int64_t depth, int64_t readable, Row&& row) {
    const int64_t n = std::min<int64_t>(readable, kTileStride);
    interleave(to, row(2 * u), 2 * u + 1 < depth ? row(2 * u + 1) : nullptr, n, n);
  }
  template <int AI, int AK, int M = kTileHeight>
  static void tile(int64_t rows, int64_t units, const float* a, const float* b, float* c, int64_t ldc,
                   bool add) {
    if (rows == M) return pair_tile<M, AI, AK>(units, a, b, c, ldc, add);
    if constexpr (M > 1) tile<AI, AK, M - 1>(rows, units, a, b, c, ldc, add);
  }

 private:
  static float pair(const bf16* low, const bf16* high) {
    return std::bit_cast<float>(static_cast<uint32_t>(low->bits) |
                                (high ? static_cast<uint32_t>(high->bits) << 16 : 0u));
  }
  /// to[i] = (low[i], high[i]) for i < n, zero for n <= i < room; high may be null.
  static void interleave(float* to, const bf16* low, const bf16* high, int64_t n, int64_t room) {
    constexpr int64_t W = Simd<float>::kWidth;
    int64_t i = 0;
    for (; i + W <= n; i += W) {
      const WordVec l = reinterpret_cast<WordVec>(load_vec(low + i)) >> 16,
                    h = high ? reinterpret_cast<WordVec>(load_vec(high + i)) : WordVec{};
      store_vec(to + i, reinterpret_cast<Vec<float>>(l | h));
    }
    for (; i < n; ++i) to[i] = pair(low + i, high ? high + i : nullptr);
    for (; i < room; ++i) to[i] = 0;
  }
};

#endif

/// Calls f with the form of elements for this storage type and processor.
template <class F>
void with_elements(DType storage, F&& f) {
#if defined(SLUICE_ISA_avx512) && !defined(__clang__)
  // AMX would not use these, and beside it AVX512-BF16 is slower than f32 (core/cpu_features.h).
  const CpuFeatures& cpu = cpu_features();
  if (storage == DType::bf16 && bf16_products() && cpu.avx512_bf16 && !cpu.amx_bf16) return f(Pairs{});
#endif
  with_storage_type(storage, [&](auto tag) { f(Singles<decltype(tag)>{}); });
}

}  // namespace
