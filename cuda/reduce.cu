// Bound by memory: every element is read once. A block reduces one chunk of 64 Ki elements (256 threads,
// 16-byte loads, several in flight), one more block the chunks' results: the order of summation depends on
// the element count alone. Not yet run on a GPU.
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

}  // namespace

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
