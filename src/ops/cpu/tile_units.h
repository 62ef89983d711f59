// Units that multiply tiles of bf16, at most 32 rows by 32 columns, in steps of 32 elements of the depth.
// Three have one interface: AMX, which has tiles in each core; its emulation, with the same bits (Intel's
// Software Developer's Manual, TDPBF16PS: sums of even and odd elements apart, denormal numbers are zero), so
// that every processor can test what runs on AMX; and AVX512-BF16, whose registers hold a tile's sums. A sum
// that is continued (`add`) has the bits that it would have had in one piece. Include between isa_begin.h and
// isa_end.h, after pairs.h.

namespace {

/// Rows and columns of a product that a unit computes at once, and the depth of one of its steps.
constexpr int64_t kUnitRows = 32, kUnitColumns = 32, kUnitDepth = 32;
static_assert(kUnitColumns == kPairStrip);

/// c (rows, 32) = sums, past the caches; rows of c begin with their lines. A unit's end() is the fence.
inline void stream_rows(float* c, int64_t ldc, const float* sums, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < kUnitColumns; i += Simd<float>::kWidth)
      store_past_caches(c + r * ldc + i, load_vec(sums + r * kUnitColumns + i));
}

struct EmulatedUnit {
  /// Whether rows of a may lie in a strip of pairs.
  static constexpr bool kTakesStrips = false;
  /// Elements of a strip of b that stay in a cache while rows of a pass by.
  static constexpr int64_t kDepthBlock = 512;
  /// Bytes of rows of a above which one block of the depth is multiplied with so many strips before the next.
  static constexpr int64_t kRowBytes = 512 << 10, kStripsTogether = 16;
  /// Between these a thread may call the others.
  static void begin() {}
  static void end() {}

  /// c (rows, 32) (= | +=) a (rows, 32 steps) b: rows <= 32, a in rows of elements lda apart, b a strip of
  /// pairs.
  static void multiply(int64_t rows, int64_t steps, const bf16* a, int64_t lda, const float* b, float* c,
                       int64_t ldc, bool add) {
    for (int64_t i = 0; i < rows; ++i) {
      float* const to = c + i * ldc;
      if (!add) std::fill_n(to, kUnitColumns, 0.0f);
      for (int64_t s = 0; s < steps; ++s)
        step(to, a + i * lda + s * kUnitDepth, b + s * kUnitDepth / 2 * kUnitColumns);
    }
  }

  /// y (rows, columns <= 32) (= | +=) c, rounded to nearest even.
  static void store(bf16* y, int64_t ldy, const float* c, int64_t rows, int64_t columns, bool add) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < columns; ++i) {
        bf16& to = y[r * ldy + i];
        to = bf16(flushed(add ? c[r * kUnitColumns + i] + static_cast<float>(to) : c[r * kUnitColumns + i]));
      }
  }

  /// Pairs of rows of sums, rounded: to[strip][u][column] = (s[2u][column], s[2u + 1][column]), zero beyond
  /// `rows`.
  static void pair_rows(float* to, int64_t units, const float* s, int64_t lds, int64_t rows, int64_t strips) {
    for (int64_t u = 0; u < units; ++u)
      for (int64_t i = 0; i < strips * kPairStrip; ++i) {
        const auto at = [&](int64_t r) { return bf16(r < rows ? flushed(s[r * lds + i]) : 0.0f); };
        const bf16 low = at(2 * u), high = at(2 * u + 1);
        to[(i / kPairStrip * units + u) * kPairStrip + i % kPairStrip] = pair_of(&low, &high);
      }
  }

  /// Rows of sums, rounded: to[row][column] = s[row][column], zero for columns <= column < padded.
  static void round_rows(bf16* to, int64_t ld, const float* s, int64_t lds, int64_t rows, int64_t columns,
                         int64_t padded) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < padded; ++i)
        to[r * ld + i] = bf16(i < columns ? flushed(s[r * lds + i]) : 0.0f);
  }

 private:
  static float flushed(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    return bits & 0x7f800000u ? x : std::bit_cast<float>(bits & 0x80000000u);
  }
  static void step(float* c, const bf16* a, const float* b) {
    std::array<float, kUnitColumns> even{}, odd{};
    for (int64_t u = 0; u < kUnitDepth / 2; ++u) {
      uint32_t two;
      std::memcpy(&two, a + 2 * u, sizeof two);  // packed rows were written as floats
      const float a_even = flushed(std::bit_cast<float>(two << 16)),
                  a_odd = flushed(std::bit_cast<float>(two & 0xffff0000u));
      for (int64_t j = 0; j < kUnitColumns; ++j) {
        const uint32_t pair = std::bit_cast<uint32_t>(b[u * kUnitColumns + j]);
        const auto i = static_cast<size_t>(j);
        even[i] = flushed(std::fma(a_even, flushed(std::bit_cast<float>(pair << 16)), even[i]));
        odd[i] = flushed(std::fma(a_odd, flushed(std::bit_cast<float>(pair & 0xffff0000u)), odd[i]));
      }
    }
    for (int64_t j = 0; j < kUnitColumns; ++j)
      c[j] = flushed(flushed(c[j]) + flushed(even[static_cast<size_t>(j)] + odd[static_cast<size_t>(j)]));
  }
};

#if defined(SLUICE_ISA_avx512)

#define SLUICE_AVX512_BF16 "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,avx512bf16"
#define SLUICE_TARGET_BF16 __attribute__((target(SLUICE_AVX512_BF16)))
#define SLUICE_TARGET_AMX __attribute__((target(SLUICE_AVX512_BF16 ",amx-tile,amx-bf16")))

/// Sums that become bf16, by vectors with AMX too.
struct VectorRounding {
  /// Whole lines of results go past the caches, which would read them first: another op reads them, when they
  /// have long left the cache.
  [[gnu::noinline]] SLUICE_TARGET_BF16 static void store(bf16* y, int64_t ldy, const float* c, int64_t rows,
                                                         int64_t columns, bool add) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << columns) - 1);
    const bool whole_lines =
        columns == kUnitColumns && !add && ldy % 32 == 0 && reinterpret_cast<uintptr_t>(y) % 64 == 0;
    for (int64_t r = 0; r < rows; ++r, c += kUnitColumns, y += ldy) {
      __m512 low = _mm512_loadu_ps(c), high = _mm512_loadu_ps(c + 16);
      if (add) {
        low += widened(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), y));
        high += widened(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask >> 16), y + 16));
      }
      const auto rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
      if (whole_lines)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(y), rounded);
      else
        _mm512_mask_storeu_epi16(y, mask, rounded);
    }
  }

  [[gnu::noinline]] SLUICE_TARGET_BF16 static void pair_rows(float* to, int64_t units, const float* s,
                                                             int64_t lds, int64_t rows, int64_t strips) {
    // Words of the low row and of the high one, which lie behind each other, side by side.
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 16; ++i)
      order[2 * i] = static_cast<uint16_t>(i), order[2 * i + 1] = static_cast<uint16_t>(16 + i);
    const __m512i by_pairs = _mm512_load_si512(order);
    for (int64_t strip = 0; strip < strips; ++strip, s += kPairStrip)
      for (int64_t u = 0; u < units; ++u, to += kPairStrip)
        for (int64_t i = 0; i < kPairStrip; i += 16) {
          const float* const low = s + 2 * u * lds + i;
          const __m512 first = 2 * u < rows ? _mm512_loadu_ps(low) : __m512{},
                       second = 2 * u + 1 < rows ? _mm512_loadu_ps(low + lds) : __m512{};
          _mm512_storeu_si512(
              to + i, _mm512_permutexvar_epi16(by_pairs, (__m512i)_mm512_cvtne2ps_pbh(second, first)));
        }
  }

  [[gnu::noinline]] SLUICE_TARGET_BF16 static void round_rows(bf16* to, int64_t ld, const float* s,
                                                              int64_t lds, int64_t rows, int64_t columns,
                                                              int64_t padded) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < padded; i += 32) {
        const auto mask = static_cast<uint32_t>((uint64_t{1} << std::min<int64_t>(32, columns - i)) - 1);
        const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), s + r * lds + i),
                     high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), s + r * lds + i + 16);
        _mm512_storeu_si512(to + r * ld + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
  }

 private:
  SLUICE_TARGET_BF16 static __m512 widened(__m256i halves) {
    typedef uint32_t Words __attribute__((vector_size(64)));
    return (__m512)((Words)_mm512_maskz_cvtepu16_epi32(0xffff, halves)
                    << 16);  // the plain one warns in GCC 12
  }
};

/// Vectors of pairs: a lane adds two products to its sum. Up to 14 rows of 32 sums lie in registers.
struct Avx512Bf16Unit : VectorRounding {
  static constexpr bool kTakesStrips = true;
  static constexpr int64_t kDepthBlock = 2048;  // 128 KiB of b, which stream from the second cache in time
  static constexpr int64_t kRowBytes = 512 << 10, kStripsTogether = 1;  // it waits for no rows
  static constexpr int kMostRows = 14;

  static void begin() {}
  static void end() { _mm_sfence(); }  // after stores past the caches

  static void multiply(int64_t rows, int64_t steps, const bf16* a, int64_t lda, const float* b, float* c,
                       int64_t ldc, bool add) {
    tiles<1>(rows, steps * kUnitDepth / 2, a, lda, b, c, ldc, add);
  }

  /// The same of `units` pairs of rows that lie in a strip of pairs. past_caches, where c is overwritten and
  /// its rows begin with lines of the caches: c is not read first, nor kept in the caches.
  static void multiply_strip(int64_t rows, int64_t units, const bf16* a, const float* b, float* c,
                             int64_t ldc, bool add, bool past_caches = false) {
    tiles<kPairStrip>(rows, units, a, 2, b, c, ldc, add, past_caches);
  }

  /// The same of at most kMostRows rows, whose pairs lie kPairStep pairs apart.
  template <int kPairStep, int M = kMostRows>
  static void tile(int64_t rows, int64_t units, const bf16* a, int64_t lda, const float* b, float* c,
                   int64_t ldc, bool add, bool past_caches = false) {
    if (rows == M) return multiply_rows<M, kPairStep>(units, a, lda, b, c, ldc, add, past_caches);
    if constexpr (M > 1) tile<kPairStep, M - 1>(rows, units, a, lda, b, c, ldc, add, past_caches);
  }

 private:
  template <int kPairStep>
  static void tiles(int64_t rows, int64_t units, const bf16* a, int64_t lda, const float* b, float* c,
                    int64_t ldc, bool add, bool past_caches = false) {
    const int64_t parts = ceil_div(rows, kMostRows);
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t row = rows * i / parts;
      tile<kPairStep>(rows * (i + 1) / parts - row, units, a + row * lda, lda, b, c + row * ldc, ldc, add,
                      past_caches);
    }
  }

  template <int M, int kPairStep>
  [[gnu::noinline]] SLUICE_TARGET_BF16 static void multiply_rows(int64_t units, const bf16* a, int64_t lda,
                                                                 const float* b, float* c, int64_t ldc,
                                                                 bool add, bool past_caches) {
    typedef int Pair __attribute__((may_alias, aligned(2)));
    __m512 s[M][2];
#pragma GCC unroll 14
    for (int i = 0; i < M; ++i) {
      s[i][0] = add ? _mm512_loadu_ps(c + i * ldc) : __m512{};
      s[i][1] = add ? _mm512_loadu_ps(c + i * ldc + 16) : __m512{};
    }
    for (int64_t u = 0; u < units; ++u, a += 2 * kPairStep, b += kUnitColumns) {
      const auto b0 = (__m512bh)_mm512_loadu_ps(b), b1 = (__m512bh)_mm512_loadu_ps(b + 16);
#pragma GCC unroll 14
      for (int i = 0; i < M; ++i) {
        const auto x = (__m512bh)_mm512_set1_epi32(*reinterpret_cast<const Pair*>(a + i * lda));
        s[i][0] = _mm512_dpbf16_ps(s[i][0], x, b0);
        s[i][1] = _mm512_dpbf16_ps(s[i][1], x, b1);
      }
    }
#pragma GCC unroll 14
    for (int i = 0; i < M; ++i) {
      if (past_caches) {
        _mm512_stream_ps(c + i * ldc, s[i][0]);
        _mm512_stream_ps(c + i * ldc + 16, s[i][1]);
      } else {
        _mm512_storeu_ps(c + i * ldc, s[i][0]);
        _mm512_storeu_ps(c + i * ldc + 16, s[i][1]);
      }
    }
  }
};

/// Tiles 0 to 3 are the sums, (row, column) = (0, 0), (0, 1), (1, 0), (1, 1); 4 and 5 the rows of a; 6 and 7
/// the columns of b.
struct AmxUnit : VectorRounding {
  static constexpr bool kTakesStrips = false;
  static constexpr int64_t kDepthBlock = 512;  // 32 KiB of b, which the first cache keeps
  static constexpr int64_t kRowBytes = 512 << 10, kStripsTogether = 16;  // 256 rows' part and theirs: 768 KiB
  static void begin() { configure(kUnitRows); }
  SLUICE_TARGET_AMX static void end() {
    _tile_release();
    _mm_sfence();  // after stores past the caches
  }

  static void multiply(int64_t rows, int64_t steps, const bf16* a, int64_t lda, const float* b, float* c,
                       int64_t ldc, bool add) {
    if (rows == kUnitRows) return multiply_two(steps, a, lda, b, c, ldc, add);
    configure(rows);
    rows > kUnitRows / 2 ? multiply_two(steps, a, lda, b, c, ldc, add)
                         : multiply_one(steps, a, lda, b, c, ldc, add);
    configure(kUnitRows);
  }

 private:
  /// Tiles for `rows` <= 32 rows of a and c. The compiler does not see that the instruction reads its
  /// operand.
  [[gnu::noinline]] SLUICE_TARGET_AMX static void configure(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } tiles;
    const auto upper = static_cast<uint8_t>(std::min<int64_t>(rows, 16)),
               lower = static_cast<uint8_t>(rows > 16 ? rows - 16 : 16);
    for (const int t : {0, 1, 4}) tiles.rows[t] = upper;
    for (const int t : {2, 3, 5}) tiles.rows[t] = lower;
    for (const int t : {6, 7}) tiles.rows[t] = 16;
    asm volatile("" ::"r"(&tiles) : "memory");
    _tile_loadconfig(&tiles);
  }

  /// Loads come first: the unit multiplies while the next step's are on their way.
  [[gnu::noinline]] SLUICE_TARGET_AMX static void multiply_two(int64_t steps, const bf16* a, int64_t lda,
                                                               const float* b, float* c, int64_t ldc,
                                                               bool add) {
    constexpr int64_t kRow = kUnitColumns * 4;
    const int64_t a_row = lda * 2, c_row = ldc * 4;
    asm volatile("" ::: "memory");  // tile loads do not say that they read memory
    if (add) {
      _tile_loadd(0, c, c_row);
      _tile_loadd(1, c + 16, c_row);
      _tile_loadd(2, c + 16 * ldc, c_row);
      _tile_loadd(3, c + 16 * ldc + 16, c_row);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; ++s, a += kUnitDepth, b += kUnitDepth / 2 * kUnitColumns) {
      _tile_loadd(4, a, a_row);
      _tile_loadd(6, b, kRow);
      _tile_loadd(5, a + 16 * lda, a_row);
      _tile_loadd(7, b + 16, kRow);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_row);
    _tile_stored(1, c + 16, c_row);
    _tile_stored(2, c + 16 * ldc, c_row);
    _tile_stored(3, c + 16 * ldc + 16, c_row);
    asm volatile("" ::: "memory");
  }

  /// At most 16 rows.
  [[gnu::noinline]] SLUICE_TARGET_AMX static void multiply_one(int64_t steps, const bf16* a, int64_t lda,
                                                               const float* b, float* c, int64_t ldc,
                                                               bool add) {
    constexpr int64_t kRow = kUnitColumns * 4;
    const int64_t a_row = lda * 2, c_row = ldc * 4;
    asm volatile("" ::: "memory");
    if (add) {
      _tile_loadd(0, c, c_row);
      _tile_loadd(1, c + 16, c_row);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    for (int64_t s = 0; s < steps; ++s, a += kUnitDepth, b += kUnitDepth / 2 * kUnitColumns) {
      _tile_loadd(4, a, a_row);
      _tile_loadd(6, b, kRow);
      _tile_loadd(7, b + 16, kRow);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c, c_row);
    _tile_stored(1, c + 16, c_row);
    asm volatile("" ::: "memory");
  }
};

#endif

/// Calls f with the unit that this process multiplies tiles with; bf16_unit() is one that does.
template <class F>
void with_tile_unit(F&& f) {
#if defined(SLUICE_ISA_avx512)
  if (bf16_unit() == Bf16Unit::amx) return f(AmxUnit{});
  if (bf16_unit() == Bf16Unit::avx512_bf16) return f(Avx512Bf16Unit{});
#endif
  f(EmulatedUnit{});
}

}  // namespace
