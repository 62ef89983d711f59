// Memory-bound: every element is read once. A block reduces one chunk of 64 Ki elements (256 threads, 16-byte
// loads, several in flight), and another block the results of the chunks: the order of summation depends only
// on the element count. Not yet run on a GPU.
#include "common/map.cuh"
#include "ops/reduce.h"

namespace sluice::cuda {
namespace {

constexpr int64_t kChunk = 65536;
constexpr int kChunkThreads = 256, kFinalThreads = 1024;

struct Sum {
  using Partial = double;
  static constexpr DType kDType = DType::f64;
  DEVICE_INLINE double of(float x) const { return x; }
  DEVICE_INLINE double combine(double a, double b) const { return a + b; }
  template <int kThreads>
  DEVICE_INLINE double block(double v) const {
    return block_sum<kThreads>(v);
  }
  DEVICE_INLINE double value(double v) const { return v; }
};

struct SumOfSquares : Sum {
  DEVICE_INLINE double of(float x) const { return static_cast<double>(x) * x; }
};

/// |x| as an integer: the order of non-negative floats is that of their bits, with NaN above infinity.
struct MaxAbs {
  using Partial = unsigned;
  static constexpr DType kDType = DType::i32;
  DEVICE_INLINE unsigned of(float x) const { return __float_as_uint(x) & 0x7fffffffu; }
  DEVICE_INLINE unsigned combine(unsigned a, unsigned b) const { return a > b ? a : b; }
  template <int kThreads>
  DEVICE_INLINE unsigned block(unsigned v) const {
    STATIC_SMEM(unsigned, partial, [kThreads / 32]);
    v = __reduce_max_sync(kFullWarp, v);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    for (int i = 0; i < kThreads / 32; ++i) v = combine(v, partial[i]);
    return v;
  }
  DEVICE_INLINE double value(unsigned v) const { return __uint_as_float(v); }
};

template <class R, class T, int kN>
__global__ void __launch_bounds__(kChunkThreads)
    reduce_chunks_kernel(R r, typename R::Partial* partials, const T* x, int64_t n) {
  const int64_t begin = blockIdx.x * kChunk, count = n - begin < kChunk ? n - begin : kChunk;
  const int vectors = static_cast<int>(count / kN);
  const T* const chunk = x + begin;
  typename R::Partial v = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += kChunkThreads) {
    const Vec<T, kN> in = load_vec<kN>(chunk + i * kN);
#pragma unroll
    for (int e = 0; e < kN; ++e) v = r.combine(v, r.of(to_float(in.v[e])));
  }
  const int tail = vectors * kN + static_cast<int>(threadIdx.x);
  if (tail < count) v = r.combine(v, r.of(to_float(chunk[tail])));
  v = r.template block<kChunkThreads>(v);
  if (threadIdx.x == 0) partials[blockIdx.x] = v;
}

template <class R>
__global__ void __launch_bounds__(kFinalThreads)
    reduce_final_kernel(R r, double* result, const typename R::Partial* partials, int chunks, bool add) {
  typename R::Partial v = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < chunks; i += kFinalThreads) v = r.combine(v, partials[i]);
  v = r.template block<kFinalThreads>(v);
  if (threadIdx.x == 0) *result = add ? *result + r.value(v) : r.value(v);
}

template <class R>
void reduce(Context& ctx, const char* name, R r, Tensor result, const Tensor& x, Into into) {
  using Partial = typename R::Partial;
  const int64_t n = x.numel(), chunks = (n + kChunk - 1) / kChunk;
  ScratchScope scratch(ctx.scratch);
  const Tensor partials = scratch.alloc("reduce_partials", R::kDType, {chunks > 0 ? chunks : 1});
  if (ctx.dry_run) return;
  Partial* const partial = device_data<Partial>(partials);
  dispatch_storage(name, x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* const p = device_data<T>(x);
    const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(chunks)), .block = dim3(kChunkThreads)};
    if (chunks == 0) return;
    if (aligned(p))
      launch(ctx, name, config, reduce_chunks_kernel<R, T, kVecWidth<T>>, r, partial, p, n);
    else
      launch(ctx, name, config, reduce_chunks_kernel<R, T, 1>, r, partial, p, n);
  });
  launch(ctx, name, {.grid = dim3(1), .block = dim3(kFinalThreads)}, reduce_final_kernel<R>, r,
         device_data<double>(result), partial, chunks, into == Into::add);
}

constexpr int kSquareThreads = 128;

/// A thread processes blocks of 32 elements, so that the values split into bins do not depend on the grid. It
/// reads a block by vectors of 16 bytes, all of them in flight together (kN > 1: x is aligned for them); the
/// order of the sum is that of single elements.
template <class T, int kN>
__global__ void __launch_bounds__(kSquareThreads)
    square_bins_kernel(double* partials, const T* x, int64_t n) {
  constexpr int kVectors = static_cast<int>(kSquareBlock) / kN;
  double bins[kSquareBins] = {};
  const int64_t blocks = (n + kSquareBlock - 1) / kSquareBlock, stride = int64_t{gridDim.x} * kSquareThreads;
  for (int64_t b = blockIdx.x * int64_t{kSquareThreads} + threadIdx.x; b < blocks; b += stride) {
    const int64_t first = b * kSquareBlock, count = n - first < kSquareBlock ? n - first : kSquareBlock;
    double s = 0;
    const auto add = [&s](T element) {
      const double v = to_float(element);
      s += v * v;
    };
    if (kN > 1 && count == kSquareBlock) {
      Vec<T, kN> in[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) in[v] = load_vec<kN>(x + first + v * kN);
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int e = 0; e < kN; ++e) add(in[v].v[e]);
    } else {
      for (int64_t i = 0; i < count; ++i) add(x[first + i]);
    }
    if (!(s < 0x1p63)) s = static_cast<double>(INFINITY);
    double magic = 0x1.8p92;
#pragma unroll
    for (int k = 0; k < kSquareBins; ++k, magic *= 0x1p-23) {
      const double part = (s + magic) - magic;  // no product that could be fused with it
      bins[k] += part;
      s -= part;
    }
  }
#pragma unroll
  for (int k = 0; k < kSquareBins; ++k) {
    const double total = block_sum<kSquareThreads>(bins[k]);
    if (threadIdx.x == 0) partials[blockIdx.x * kSquareBins + k] = total;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(32) add_bins_kernel(double* bins, const double* partials, int count) {
  if (threadIdx.x >= kSquareBins) return;
  double total = bins[threadIdx.x];
  for (int i = 0; i < count; ++i) total += partials[i * kSquareBins + static_cast<int>(threadIdx.x)];
  bins[threadIdx.x] = total;
}

constexpr int kRowsAtOnce = 8, kRowThreads = 256;

/// Sums of kRowsAtOnce rows that follow each other `stride` apart, by the tree over their numbers; a group is
/// a perfect subtree, or the rest. y (n) with one group; with several, each group's first row. Bound by
/// memory: every row is read once.
template <int kN>
__global__ void __launch_bounds__(kRowThreads)
    sum_rows_kernel(float* y, float* rows, int count, int64_t stride, int64_t n, bool add) {
  const int first = static_cast<int>(blockIdx.x) * kRowsAtOnce, here = min(count - first, kRowsAtOnce);
  float* const group = rows + first * stride;
  float* const out = gridDim.x == 1 ? y : group;
  const int64_t vectors = n / kN, step = int64_t{gridDim.y} * kRowThreads;
  for (int64_t i = blockIdx.y * int64_t{kRowThreads} + threadIdx.x; i < vectors; i += step) {
    Vec<float, kN> v[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r)
      if (r < here) v[r] = load_vec<kN>(group + r * stride + i * kN);
#pragma unroll
    for (int half = 1; half < kRowsAtOnce; half *= 2)
#pragma unroll
      for (int r = 0; r + half < kRowsAtOnce; r += 2 * half)
        if (r + half < here)
#pragma unroll
          for (int e = 0; e < kN; ++e) v[r].v[e] += v[r + half].v[e];
    if (add) {
      const Vec<float, kN> before = load_vec<kN>(out + i * kN);
#pragma unroll
      for (int e = 0; e < kN; ++e) v[0].v[e] += before.v[e];
    }
    store_vec<kN>(out + i * kN, v[0]);
  }
}

}  // namespace

void sum_rows(Context& ctx, Tensor y, const Tensor& rows, Into into) {
  check_storage("sum_rows", y);
  if (ctx.dry_run || y.numel() == 0) return;
  float *const out = device_data<float>(y), *const all = device_data<float>(rows);
  const int64_t n = y.numel();
  const bool vectors = n % 4 == 0 && aligned(out, all);
  const int64_t tile = int64_t{kRowThreads} * (vectors ? 4 : 1);
  // Groups of eight become one row each, until one group is left.
  for (int64_t count = rows.dim(0), stride = n; count > 0; stride *= kRowsAtOnce) {
    const int64_t groups = (count + kRowsAtOnce - 1) / kRowsAtOnce;
    const LaunchConfig config = {
        // There may be more groups than a grid's y axis has room for.
        .grid = dim3(static_cast<unsigned>(groups),
                     static_cast<unsigned>(std::min<int64_t>((n + tile - 1) / tile, 2048))),
        .block = dim3(kRowThreads)};
    launch(ctx, "sum_rows", config, vectors ? sum_rows_kernel<4> : sum_rows_kernel<1>, out, all,
           static_cast<int>(count), stride, n, groups == 1 && into == Into::add);
    count = groups == 1 ? 0 : groups;
  }
}

void add_squares(Context& ctx, Tensor bins, const Tensor& x) {
  const int64_t n = x.numel(), blocks = (n + kSquareBlock - 1) / kSquareBlock;
  const int64_t grid = std::min<int64_t>((blocks + kSquareThreads - 1) / kSquareThreads, 512);
  ScratchScope scratch(ctx.scratch);
  const Tensor partials = scratch.alloc("square_bins", DType::f64, {std::max<int64_t>(grid, 1), kSquareBins});
  if (ctx.dry_run || grid == 0) return;
  dispatch_storage("add_squares", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* const p = device_data<T>(x);
    launch(ctx, "add_squares", {.grid = dim3(static_cast<unsigned>(grid)), .block = dim3(kSquareThreads)},
           aligned(p) ? square_bins_kernel<T, kVecWidth<T>> : square_bins_kernel<T, 1>,
           device_data<double>(partials), p, n);
  });
  launch(ctx, "add_squares", {.grid = dim3(1), .block = dim3(32)}, add_bins_kernel, device_data<double>(bins),
         static_cast<const double*>(device_data<double>(partials)), static_cast<int>(grid));
}

void sum_of_squares(Context& ctx, Tensor result, const Tensor& x) {
  reduce(ctx, "sum_of_squares", SumOfSquares{}, result, x, Into::overwrite);
}

void sum(Context& ctx, Tensor result, const Tensor& x, Into into) {
  reduce(ctx, "sum", Sum{}, result, x, into);
}

void max_abs(Context& ctx, Tensor result, const Tensor& x) {
  reduce(ctx, "max_abs", MaxAbs{}, result, x, Into::overwrite);
}

}  // namespace sluice::cuda
