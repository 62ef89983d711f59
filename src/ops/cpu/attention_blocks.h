// Register-blocked products, transposes and exp for attention. Include between isa_begin.h and isa_end.h,
// after vectors.h.
// Queries are in the lanes of vectors: scores are stored transposed, S^T[key][query], so that row maxima,
// sums and rescaling are vertical operations, and K and V are read in their stored order, broadcasting one
// element at a time.

namespace {

#if defined(SLUICE_ISA_avx512)
constexpr int kTileRows = 12;  // 12 x 2 accumulators of 32 registers
#elif defined(SLUICE_ISA_avx2)
constexpr int kTileRows = 6;  // 6 x 2 of 16
#else
constexpr int kTileRows = 6;
#endif

// Rows (query, head of the group) per block, and keys per block. The row stride in memory, kLaneStride, is
// not a power of two, so that a column of tiles does not map to a few cache sets.
constexpr int64_t kLanes = 128, kLaneStride = 144, kKeys = 96;

/// <x, y> over n elements; the order of the sum depends on n alone.
template <class T, class A>
inline A dot_row(const T* x, const T* y, int64_t n) {
  constexpr int W = Simd<A>::kWidth;
  Vec<A> v{};
  int64_t i = 0;
  for (; i + W <= n; i += W) v += load_vec(x + i) * load_vec(y + i);
  A s = sum_lanes<A>(v);
  for (; i < n; ++i) s += load(x + i) * load(y + i);
  return s;
}

// ---- e^x of vectors ----

/// e^x for x <= 88, relative error below 3e-7; exactly 0 below -87; NaN stays NaN. The range reduction and
/// polynomial of exp_fast, with n + 127 read off the mantissa of x log2(e) + 1.5 * 2^23.
inline Vec<float> exp_vec(Vec<float> x) {
  const Vec<float> shifted = x * 1.44269504088896341f + (12582912.0f + 127.0f);
  const Vec<float> n = shifted - (12582912.0f + 127.0f);
  const Vec<float> r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec<float> p = splat(1.3981999507e-3f);
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Vec<float> y = p * reinterpret_cast<Vec<float>>(reinterpret_cast<Simd<float>::Mask>(shifted) << 23);
  return x < -87.0f ? Vec<float>{} : y;  // below that, y is undefined
}
inline Vec<double> exp_vec(Vec<double> x) {
  Vec<double> y{};
  for (int i = 0; i < Simd<double>::kWidth; ++i) y[i] = std::exp(x[i]);
  return y;
}

/// log x of normal x > 0, relative error below 2e-7: the mantissa is taken to [sqrt(1/2), sqrt(2)), and a
/// polynomial of degree 9 is log(1 + f) there (Cephes' logf).
inline Vec<float> log_vec(Vec<float> x) {
  using Mask = Simd<float>::Mask;
  const Mask bits = reinterpret_cast<Mask>(x), exponent = (bits - 0x3f3504f3) >> 23;
  const Vec<float> f = reinterpret_cast<Vec<float>>(bits - (exponent << 23)) - 1.0f,
                   e = __builtin_convertvector(exponent, Vec<float>), square = f * f;
  Vec<float> p = splat(7.0376836292e-2f);
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  return f + (p * f * square + e * -2.12194440e-4f - 0.5f * square) + e * 0.693359375f;
}
inline Vec<double> log_vec(Vec<double> x) {
  Vec<double> y{};
  for (int i = 0; i < Simd<double>::kWidth; ++i) y[i] = std::log(x[i]);
  return y;
}

// ---- transposes ----

/// dst[d][i] = rows[i][d] * scale for i < n, d < depth, zero for n <= i < lanes and depth <= d <
/// padded_depth. lanes and padded_depth are multiples of the vector width; rows[i] may be anywhere.
template <class T, class A>
void pack_transposed(A* dst, const T* const* rows, int64_t n, int64_t lanes, int64_t depth,
                     int64_t padded_depth, A scale) {
  constexpr int W = Simd<A>::kWidth;
  for (int64_t i = 0; i < lanes; i += W)
    for (int64_t d = 0; d < padded_depth; d += W) {
      if (i + W <= n && d + W <= depth) {
        Vec<A> r[W];
#pragma GCC unroll 16
        for (int e = 0; e < W; ++e) r[e] = load_vec(rows[i + e] + d) * scale;
        transpose<A>(r);
#pragma GCC unroll 16
        for (int e = 0; e < W; ++e) store_vec(dst + (d + e) * kLaneStride + i, r[e]);
      } else {
        for (int64_t e = 0; e < W; ++e)
          for (int64_t c = 0; c < W; ++c)
            dst[(d + e) * kLaneStride + i + c] =
                i + c < n && d + e < depth ? load(rows[i + c] + d + e) * scale : A(0);
      }
    }
}

/// rows[i][d] = src[d][i] * factor[i] for i < n, d < depth.
template <class T, class A>
void unpack_transposed(T* const* rows, const A* src, const A* factor, int64_t n, int64_t depth) {
  constexpr int W = Simd<A>::kWidth;
  for (int64_t i = 0; i < n; i += W) {
    const Vec<A> f = load_vec(factor + i);
    for (int64_t d = 0; d < depth; d += W) {
      if (i + W <= n && d + W <= depth) {
        Vec<A> r[W];
#pragma GCC unroll 16
        for (int e = 0; e < W; ++e) r[e] = load_vec(src + (d + e) * kLaneStride + i) * f;
        transpose<A>(r);
#pragma GCC unroll 16
        for (int e = 0; e < W; ++e) store_vec(rows[i + e] + d, r[e]);
      } else {
        for (int64_t c = i; c < std::min(i + W, n); ++c)
          for (int64_t e = d; e < std::min(d + W, depth); ++e)
            store(rows[c] + e, src[e * kLaneStride + c] * factor[c]);
      }
    }
  }
}

// ---- products ----

enum class Onto { overwrite, add, rescale_add };

/// C[m][n] (= | += | = alpha[n] C +) sum_k A[m, k] B[k][n] for one tile of M rows and NV vectors. Element (m,
/// k) of A is a[m * am + k * ak]; AM is am where it is known at compile time (its multiples are then address
/// offsets), else 0. The sum over k runs in order in one accumulator per element: a value does not depend on
/// the tile it fell in.
template <class A, int AM, int M, int NV>
inline void product_tile(int64_t depth, const A* a, int64_t am_, int64_t ak, const A* b, int64_t ldb, A* c,
                         int64_t ldc, Onto onto, const A* alpha) {
  constexpr int W = Simd<A>::kWidth;
  const int64_t am = AM ? AM : am_;
  Vec<A> s[M][NV];
  if (onto == Onto::overwrite) {
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) s[m][v] = Vec<A>{};
  } else if (onto == Onto::add) {
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) s[m][v] = load_vec(c + m * ldc + v * W);
  } else {
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) s[m][v] = load_vec(c + m * ldc + v * W) * load_vec(alpha + v * W);
  }
  for (int64_t k = 0; k < depth; ++k, a += ak, b += ldb) {
    Vec<A> bv[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) bv[v] = load_vec(b + v * W);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const Vec<A> av = splat(a[m * am]);
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) s[m][v] += av * bv[v];
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) store_vec(c + m * ldc + v * W, s[m][v]);
}

template <class A, int AM, int M, int NV>
inline void product_rows(int64_t rows, int64_t depth, const A* a, int64_t am, int64_t ak, const A* b,
                         int64_t ldb, A* c, int64_t ldc, Onto onto, const A* alpha) {
  int64_t m = 0;
  for (; m + M <= rows; m += M)
    product_tile<A, AM, M, NV>(depth, a + m * am, am, ak, b, ldb, c + m * ldc, ldc, onto, alpha);
  if constexpr (M > 1) {
    constexpr int kNext = M > 8 ? 8 : M > 4 ? 4 : M > 2 ? 2 : 1;
    if (m < rows)
      product_rows<A, AM, kNext, NV>(rows - m, depth, a + m * am, am, ak, b, ldb, c + m * ldc, ldc, onto,
                                     alpha);
  }
}

/// The product above for any number of rows, and columns a multiple of the vector width. Strips of two
/// vectors of B stay in the first cache while A streams past.
template <class A, int AM>
void product(int64_t rows, int64_t columns, int64_t depth, const A* a, int64_t am, int64_t ak, const A* b,
             int64_t ldb, A* c, int64_t ldc, Onto onto, const A* alpha = nullptr) {
  constexpr int W = Simd<A>::kWidth;
  if constexpr (AM != 0) am = AM;
  int64_t n = 0;
  for (; n + 2 * W <= columns; n += 2 * W)
    product_rows<A, AM, kTileRows, 2>(rows, depth, a, am, ak, b + n, ldb, c + n, ldc, onto,
                                      alpha ? alpha + n : alpha);
  if (n < columns)
    product_rows<A, AM, kTileRows, 1>(rows, depth, a, am, ak, b + n, ldb, c + n, ldc, onto,
                                      alpha ? alpha + n : alpha);
}

// Rows of key blocks are head_stride(D) apart: two strides known at compile time, and any other.
constexpr int64_t head_stride(int64_t depth) {
  return depth <= 64 ? 80 : depth <= 128 ? 144 : (depth + 15) / 16 * 16 + 16;
}

/// S^T[key][lane] = sum_d K[key][d] Q^T[d][lane], K with rows head_stride(depth) apart.
template <class A>
void key_scores(int64_t keys, int64_t lanes, int64_t depth, const A* k, const A* q_t, A* s) {
  const int64_t stride = head_stride(depth);
  if (stride == 80)
    product<A, 80>(keys, lanes, depth, k, 80, 1, q_t, kLaneStride, s, kLaneStride, Onto::overwrite);
  else if (stride == 144)
    product<A, 144>(keys, lanes, depth, k, 144, 1, q_t, kLaneStride, s, kLaneStride, Onto::overwrite);
  else
    product<A, 0>(keys, lanes, depth, k, stride, 1, q_t, kLaneStride, s, kLaneStride, Onto::overwrite);
}

/// Y^T[d][lane] (onto) sum_key V[key][d] P^T[key][lane].
template <class A>
void mix_keys(int64_t padded_depth, int64_t lanes, int64_t keys, const A* v, int64_t v_stride, const A* p_t,
              A* y_t, Onto onto, const A* alpha = nullptr) {
  product<A, 1>(padded_depth, lanes, keys, v, 1, v_stride, p_t, kLaneStride, y_t, kLaneStride, onto, alpha);
}

/// dV[key][d] += sum_lane P^T[key][lane] dO[lane][d].
template <class A>
void mix_lanes(int64_t keys, int64_t padded_depth, int64_t lanes, const A* p_t, const A* d_o,
               int64_t d_o_stride, A* dv, int64_t dv_stride) {
  product<A, static_cast<int>(kLaneStride)>(keys, padded_depth, lanes, p_t, kLaneStride, 1, d_o, d_o_stride,
                                            dv, dv_stride, Onto::add);
}

}  // namespace
