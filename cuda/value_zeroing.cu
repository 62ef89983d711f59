// For evaluation only: memory-bound, one element per thread. Not yet run on a GPU.
#include "common/map.cuh"
#include "common/math.cuh"
#include "ops/value_zeroing.h"

namespace sluice::cuda {
namespace {

constexpr int kBlock = 256;

/// A block per token.
template <class T>
__global__ void __launch_bounds__(kBlock)
    zero_first_values_kernel(T* out, const T* v, const int* first_key, int64_t row) {
  const int64_t token = blockIdx.x;
  const bool first = first_key[token] == token;
  for (int64_t i = token * row + threadIdx.x; i < (token + 1) * row; i += kBlock)
    out[i] = first ? from_float<T>(0.f) : v[i];
}

/// taken[h] = whether the head's mean attention on the first key, over the first tokens, is above the
/// threshold. A block per head. sink (H), or extra (H, T), or neither.
template <class T>
__global__ void __launch_bounds__(kBlock)
    sink_heads_kernel(int* taken, const float* lse, const float* z0, const T* sink, const float* extra,
                      int64_t tokens, double threshold, int64_t averaged) {
  const int64_t h = blockIdx.x;
  double sum = 0;
  for (int64_t t = threadIdx.x; t < averaged; t += kBlock) {
    const float l = lse[h * tokens + t], x = z0[h * tokens + t] - l;
    const float share = extra  ? sigmoid(l - extra[h * tokens + t])
                        : sink ? sigmoid(l - to_float(sink[h]))
                               : 1.f;
    sum += static_cast<double>(expf(x > 0 ? 0.f : x) * share);
  }
  sum = block_sum<kBlock>(sum);
  if (threadIdx.x == 0) taken[h] = sum > threshold * static_cast<double>(averaged) ? 1 : 0;
}

/// Grid (heads, tokens).
template <class T>
__global__ void __launch_bounds__(kBlock)
    take_heads_kernel(T* o, const T* other, const int* taken, int64_t depth) {
  if (!taken[blockIdx.x]) return;
  const int64_t at = (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * depth;
  for (int64_t i = threadIdx.x; i < depth; i += kBlock) o[at + i] = other[at + i];
}

}  // namespace

void zero_first_values(Context& ctx, Tensor out, const Tensor& v, const Tensor& first_key) {
  if (ctx.dry_run || v.numel() == 0) return;
  dispatch_storage("zero_first_values", v, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    launch(ctx, "zero_first_values", {.grid = dim3(static_cast<unsigned>(v.dim(0))), .block = dim3(kBlock)},
           zero_first_values_kernel<T>, device_data<T>(out), static_cast<const T*>(device_data<T>(v)),
           static_cast<const int*>(device_data<int>(first_key)), v.numel() / v.dim(0));
  });
}

void take_sink_heads(Context& ctx, Tensor o, const Tensor& other, const Tensor& lse, const Tensor& z0,
                     const Tensor& sink, double threshold, int64_t averaged) {
  const int64_t tokens = o.dim(0), heads = o.dim(1);
  ScratchScope scratch(ctx.scratch);
  const bool by_query = sink && sink.rank == 2;
  const Tensor taken = scratch.alloc("sink heads", DType::i32, {heads});
  if (ctx.dry_run || o.numel() == 0) return;
  dispatch_storage("take_sink_heads", o, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    launch(ctx, "take_sink_heads", {.grid = dim3(static_cast<unsigned>(heads)), .block = dim3(kBlock)},
           sink_heads_kernel<T>, device_data<int>(taken), static_cast<const float*>(device_data<float>(lse)),
           static_cast<const float*>(device_data<float>(z0)),
           sink && !by_query ? static_cast<const T*>(device_data<T>(sink)) : nullptr,
           by_query ? static_cast<const float*>(device_data<float>(sink)) : nullptr, tokens, threshold,
           averaged);
    for (int64_t t = 0; t < tokens; t += 32768) {
      const int64_t count = std::min<int64_t>(tokens - t, 32768), at = t * heads * o.dim(2);
      launch(
          ctx, "take_sink_heads",
          {.grid = dim3(static_cast<unsigned>(heads), static_cast<unsigned>(count)), .block = dim3(kBlock)},
          take_heads_kernel<T>, device_data<T>(o) + at, static_cast<const T*>(device_data<T>(other)) + at,
          static_cast<const int*>(device_data<int>(taken)), o.dim(2));
    }
  });
}

}  // namespace sluice::cuda
