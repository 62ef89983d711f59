// Vectors as wide as the instruction set of this compilation, on GCC and Clang vector types: loads, stores,
// conversions, transposes. Include between isa_begin.h and isa_end.h, after vector_math.h.

namespace {

#if defined(SLUICE_ISA_avx512)
constexpr int kVectorBytes = 64;
#elif defined(SLUICE_ISA_avx2)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class A>
struct Bits;
template <>
struct Bits<float> {
  using type = int32_t;
};
template <>
struct Bits<double> {
  using type = int64_t;
};

template <class A>
struct Simd {
  static constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(A));
  using Int = typename Bits<A>::type;
  typedef A Vec __attribute__((vector_size(kVectorBytes)));
  typedef Int Mask __attribute__((vector_size(kVectorBytes)));
  typedef A Unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(A)), may_alias));
};
template <class A>
using Vec = typename Simd<A>::Vec;

typedef uint16_t HalfVec __attribute__((vector_size(kVectorBytes / 2)));
typedef uint16_t HalfUnaligned __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));
typedef uint32_t WordVec __attribute__((vector_size(kVectorBytes)));

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- loads, stores, conversions ----

inline Vec<float> load_vec(const float* p) { return *reinterpret_cast<const Simd<float>::Unaligned*>(p); }
inline Vec<double> load_vec(const double* p) { return *reinterpret_cast<const Simd<double>::Unaligned*>(p); }
inline Vec<float> load_vec(const bf16* p) {
#if defined(SLUICE_ISA_avx512) && !defined(__clang__)  // GCC 12 would convert each half by itself
  typedef int16_t Half __attribute__((vector_size(32)));
  typedef int16_t Unaligned __attribute__((vector_size(32), aligned(2), may_alias));
  typedef int32_t Word __attribute__((vector_size(64)));
  const Half h = *reinterpret_cast<const Unaligned*>(p);  // attributes in the cast itself would not hold
  const Word w = __builtin_ia32_pmovzxwd512_mask(h, Word{}, 0xffff);
  return reinterpret_cast<Vec<float>>(w << 16);
#else
  const HalfVec h = *reinterpret_cast<const HalfUnaligned*>(p);
  return reinterpret_cast<Vec<float>>(__builtin_convertvector(h, WordVec) << 16);
#endif
}
inline void store_vec(float* p, Vec<float> x) { *reinterpret_cast<Simd<float>::Unaligned*>(p) = x; }
/// For what no one reads before it has left the caches; p is aligned to a vector. Where another thread reads
/// it, a fence has to follow (end_stores_past_caches).
inline void store_past_caches(float* p, Vec<float> x) {
#if defined(SLUICE_ISA_avx512)
  _mm512_stream_ps(p, x);
#else
  store_vec(p, x);
#endif
}
inline void end_stores_past_caches() {
#if defined(SLUICE_ISA_avx512)
  _mm_sfence();
#endif
}
inline void store_vec(double* p, Vec<double> x) { *reinterpret_cast<Simd<double>::Unaligned*>(p) = x; }
inline HalfVec rounded_halves(Vec<float> x) {
#if defined(SLUICE_ISA_avx512)
  const __m512i u = reinterpret_cast<__m512i>(x);
  __m512i r = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
  r = _mm512_mask_add_epi32(r, _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000)), r,
                            _mm512_set1_epi32(1));
  r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));  // NaN
  const WordVec upper = reinterpret_cast<WordVec>(r) >> 16;
  return reinterpret_cast<HalfVec>(_mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(upper)));
#else
  const WordVec u = reinterpret_cast<WordVec>(x);
  const WordVec rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
  const WordVec is_nan = reinterpret_cast<WordVec>((u & 0x7fffffffu) > 0x7f800000u);
  return __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), HalfVec);
#endif
}
inline void store_vec(bf16* p, Vec<float> x) { *reinterpret_cast<HalfUnaligned*>(p) = rounded_halves(x); }

/// Parts of a vector: the first n < W lanes alone are read, the others being zero, or written. Worth their
/// while where an instruction has masks; elsewhere element by element is as fast.
#if defined(SLUICE_ISA_avx512)
constexpr bool kMaskedParts = true;
inline uint32_t first_lanes(int64_t n) { return (uint32_t{1} << n) - 1; }
inline Vec<float> load_part(const float* p, int64_t n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>(first_lanes(n)), p);
}
inline Vec<double> load_part(const double* p, int64_t n) {
  return _mm512_maskz_loadu_pd(static_cast<__mmask8>(first_lanes(n)), p);
}
inline Vec<float> load_part(const bf16* p, int64_t n) {
  const auto words = reinterpret_cast<WordVec>(_mm512_maskz_cvtepu16_epi32(
      0xffff, _mm256_maskz_loadu_epi16(static_cast<__mmask16>(first_lanes(n)), p)));
  return reinterpret_cast<Vec<float>>(words << 16);
}
inline void store_part(float* p, Vec<float> x, int64_t n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>(first_lanes(n)), x);
}
inline void store_part(double* p, Vec<double> x, int64_t n) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>(first_lanes(n)), x);
}
inline void store_part(bf16* p, Vec<float> x, int64_t n) {
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>(first_lanes(n)),
                           reinterpret_cast<__m256i>(rounded_halves(x)));
}
#else
constexpr bool kMaskedParts = false;
template <class T>
auto load_part(const T* p, int64_t n) {
  Vec<accumulate_t<T>> x{};
  for (int64_t i = 0; i < n; ++i) x[i] = load(p + i);
  return x;
}
template <class T>
void store_part(T* p, Vec<accumulate_t<T>> x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store(p + i, x[i]);
}
#endif

/// A vector of p, or, with n < W, its first n elements and zeros; and the same written.
template <class T>
[[gnu::always_inline]] inline Vec<accumulate_t<T>> take(const T* p, int64_t n) {
  return n >= Simd<accumulate_t<T>>::kWidth ? load_vec(p) : load_part(p, n);
}
template <class T>
[[gnu::always_inline]] inline void put(T* p, Vec<accumulate_t<T>> x, int64_t n) {
  n >= Simd<accumulate_t<T>>::kWidth ? store_vec(p, x) : store_part(p, x, n);
}
/// f(i, n), for take(p + i, n), of every vector of `count` elements: n is W, a constant, but in the last
/// part.
template <class A, class F>
[[gnu::always_inline]] inline void for_vectors(int64_t count, F&& f) {
  constexpr int64_t W = Simd<A>::kWidth;
  int64_t i = 0;
  for (; i + W <= count; i += W) f(i, W);
  if (i < count) f(i, count - i);
}

template <class A>
inline Vec<A> splat(A x) {
  return x - Vec<A>{};
}
template <class A>
inline A sum_lanes(Vec<A> x) {
  A s = 0;
  for (int i = 0; i < Simd<A>::kWidth; ++i) s += x[i];
  return s;
}

/// sigmoid() of vector_math.h, of every lane.
[[gnu::always_inline]] inline Vec<float> sigmoids(Vec<float> x) {
  const Vec<float> least = splat(-86.9f), most = splat(89.0f), v = -x < least ? least : -x;
  const auto e = exp_parts<Vec<float>, WordVec>(v > most ? most : v);
  return 1.0f / (e.half_scale * (e.mantissa + e.mantissa) + 1.0f);
}
inline float sigmoids(float x) { return sigmoid(x); }
inline double sigmoids(double x) { return sigmoid(x); }

/// Element i of a row, or n elements from i on in a vector, for arithmetic that is written once for both.
struct ElementAt {
  int64_t i;
  template <class T>
  [[gnu::always_inline]] accumulate_t<T> get(const T* p) const {
    return load(p + i);
  }
  template <class T>
  [[gnu::always_inline]] void set(T* p, accumulate_t<T> x) const {
    store(p + i, x);
  }
};
struct LanesAt {
  int64_t i, n;
  template <class T>
  [[gnu::always_inline]] Vec<accumulate_t<T>> get(const T* p) const {
    return take(p + i, n);
  }
  template <class T>
  [[gnu::always_inline]] void set(T* p, Vec<accumulate_t<T>> x) const {
    put(p + i, x, n);
  }
};
/// f(at) for `count` independent elements of type T. GCC 12 takes a third longer for its own vectors of bf16.
template <class T, class F>
[[gnu::always_inline]] inline void for_elements(int64_t count, F&& f) {
  if constexpr (std::is_same_v<T, bf16>) {
    for_vectors<float>(count, [&](int64_t i, int64_t n) { f(LanesAt{i, n}); });
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) f(ElementAt{i});
  }
}

/// dst[0, n) = src[0, n) * scale in the accumulate type.
template <class T, class A>
inline void convert_row(A* dst, const T* src, int64_t n, A scale) {
  constexpr int W = Simd<A>::kWidth;
  int64_t i = 0;
  for (; i + W <= n; i += W) store_vec(dst + i, load_vec(src + i) * scale);
  for (; i < n; ++i) dst[i] = load(src + i) * scale;
}
template <class T, class A>
inline void store_row(T* dst, const A* src, int64_t n) {
  constexpr int W = Simd<A>::kWidth;
  int64_t i = 0;
  for (; i + W <= n; i += W) store_vec(dst + i, load_vec(src + i));
  for (; i < n; ++i) store(dst + i, src[i]);
}

/// Asks for row[0, n), n of the row's type; locality as of __builtin_prefetch: 3 for the first cache, 2 for
/// the second.
template <int kLocality = 3, class T>
[[gnu::always_inline]] inline void prefetch_row(const T* row, int64_t n) {
  for (int64_t byte = 0; byte < n * static_cast<int64_t>(sizeof(T)); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, kLocality);
}

// ---- transposes ----

template <class A, int H, bool kHigh, size_t... E>
inline Vec<A> exchange(Vec<A> a, Vec<A> b, std::index_sequence<E...>) {
  constexpr int W = Simd<A>::kWidth;
  if constexpr (kHigh)
    return __builtin_shufflevector(a, b, ((E & H) ? W + static_cast<int>(E) : static_cast<int>(E) + H)...);
  else
    return __builtin_shufflevector(a, b, ((E & H) ? W + static_cast<int>(E) - H : static_cast<int>(E))...);
}

template <class A, int H>
[[gnu::always_inline]] inline void transpose_step(Vec<A>* r) {
  constexpr int W = Simd<A>::kWidth;
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    if (i & H) continue;
    const Vec<A> a = r[i], b = r[i + H];
    r[i] = exchange<A, H, false>(a, b, std::make_index_sequence<W>{});
    r[i + H] = exchange<A, H, true>(a, b, std::make_index_sequence<W>{});
  }
  if constexpr (H > 1) transpose_step<A, H / 2>(r);
}

/// Transposes the square r[0, W) of W vectors of width W.
template <class A>
[[gnu::always_inline]] inline void transpose(Vec<A>* r) {
  transpose_step<A, Simd<A>::kWidth / 2>(r);
}

// ---- sums of several vectors ----

/// Lanes without bit H of a and lanes with it of b, each where it is, or (kSwap) those with bit H exchanged.
/// The first is a blend, cheaper than a shuffle.
template <class A, int H, bool kSwap, size_t... E>
inline Vec<A> halves(Vec<A> a, Vec<A> b, std::index_sequence<E...>) {
  constexpr int W = Simd<A>::kWidth;
  return __builtin_shufflevector(
      a, b, (static_cast<int>(kSwap ? E ^ static_cast<size_t>(H) : E) + ((E & H) ? W : 0))...);
}

template <class A, int H>
[[gnu::always_inline]] inline void sums_step(Vec<A>* r) {
  constexpr int W = Simd<A>::kWidth;
#pragma GCC unroll 8
  for (int i = 0; i < H; ++i) {
    const Vec<A> a = r[i], b = r[i + H];
    r[i] = halves<A, H, false>(a, b, std::make_index_sequence<W>{}) +
           halves<A, H, true>(a, b, std::make_index_sequence<W>{});
  }
  if constexpr (H > 1) sums_step<A, H / 2>(r);
}

/// A vector whose lane i is the sum over the lanes of r[i], for i < W; r is used up.
template <class A>
[[gnu::always_inline]] inline Vec<A> sums_of(Vec<A>* r) {
  sums_step<A, Simd<A>::kWidth / 2>(r);
  return r[0];
}

}  // namespace
