// y = x W^T for a few rows of x, as in generation: the weight is read once, as it is stored, and each row of
// it is one sum per row of x. Limited by the memory's bandwidth. The bits of a row of y depend on neither the
// other rows nor the number of threads. Include between isa_begin.h and isa_end.h, after vectors.h and
// core/parallel_for.h.

namespace {

constexpr int64_t kFewRows = 8;

/// A vector's bytes of the weight are one vector of f32, or the even and the odd elements of bf16, which need
/// only a shift and a mask.
template <class T>
constexpr int kParts = static_cast<int>(sizeof(float) / sizeof(T));
inline Vec<float> weight_part(const float* p, int) { return load_vec(p); }
inline Vec<float> weight_part(const bf16* p, int part) {
  typedef uint32_t Unaligned __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));
  const WordVec pairs = *reinterpret_cast<const Unaligned*>(p);
  return reinterpret_cast<Vec<float>>(part == 0 ? pairs << 16 : pairs & 0xffff0000u);
}

/// x in f32 and in the order of a weight's parts; what is left of whole vectors stays in order.
template <class T>
void order_row(float* to, const T* from, int64_t K) {
  constexpr int64_t W = Simd<float>::kWidth, P = kParts<T>;
  int64_t k = 0;
  for (; k + P * W <= K; k += P * W)
    for (int64_t part = 0; part < P; ++part)
      for (int64_t i = 0; i < W; ++i) to[k + part * W + i] = load(from + k + i * P + part);
  for (; k < K; ++k) to[k] = load(from + k);
}

/// As many rows of the weight, from n on, as a vector has lanes for each of R rows of x, in the order of the
/// parts; rows of the weight beyond its N are computed from the last one and not stored. Asks for as much of
/// memory from `ahead` on as it reads, in order: the rows side by side are too many for the processor to
/// foresee.
template <class T, int R>
void few_rows_block(int64_t n, int64_t N, int64_t K, const T* w, const float* x, T* y, const T* ahead) {
  constexpr int W = Simd<float>::kWidth, M = W / R, P = kParts<T>;
  const T* row[M];
  for (int i = 0; i < M; ++i) row[i] = w + std::min(n + i, N - 1) * K;
  Vec<float> sum[W] = {};
  int64_t k = 0;
  for (; k + P * W <= K; k += P * W) {
    if (ahead) prefetch_row<2>(ahead + k * M, P * W * M);
#pragma GCC unroll 2
    for (int part = 0; part < P; ++part) {
      Vec<float> in[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) in[r] = load_vec(x + r * K + k + part * W);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const Vec<float> weight = weight_part(row[i] + k, part);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[i * R + r] += weight * in[r];
      }
    }
  }
  Vec<float> total = sums_of<float>(sum);
  for (; k < K; ++k)
    for (int i = 0; i < M; ++i)
      for (int r = 0; r < R; ++r) total[i * R + r] += load(row[i] + k) * x[r * K + k];
  for (int i = 0; i < M && n + i < N; ++i)
    for (int r = 0; r < R; ++r) store(y + r * N + n + i, total[i * R + r]);
}

/// All products of a block of as many rows of the weight as a vector has lanes, of which the next block is
/// asked for. Rows of x are taken in powers of two, while the block is in a cache.
template <class T, int R = 4>
void few_rows_blocks(int64_t rows, int64_t n, int64_t N, int64_t K, const T* w, const float* x, T* y,
                     bool asks = true) {
  constexpr int W = Simd<float>::kWidth;
  for (; rows >= R; rows -= R, x += R * K, y += R * N, asks = false)
    for (int64_t i = n; i < std::min(n + W, N); i += W / R)
      few_rows_block<T, R>(i, N, K, w, x, y, asks && i + W + W / R <= N ? w + (i + W) * K : nullptr);
  if constexpr (R > 1) few_rows_blocks<T, R / 2>(rows, n, N, K, w, x, y, asks);
}

/// y (rows, N) = x (rows, K) w^T, rows <= kFewRows, w (N, K); `ordered` has x, row by row, as order_row makes
/// it.
template <class T>
void multiply_few_rows(int64_t rows, int64_t N, int64_t K, const T* w, const float* ordered, T* y) {
  constexpr int64_t W = Simd<float>::kWidth, kBytesOfThread = 128 << 10;
  const int64_t grain = std::max<int64_t>(1, kBytesOfThread / (W * K * static_cast<int64_t>(sizeof(T))));
  parallel_for((N + W - 1) / W, grain, [=](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) few_rows_blocks(rows, block * W, N, K, w, ordered, y);
  });
}

}  // namespace
