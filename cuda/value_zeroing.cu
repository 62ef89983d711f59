// For evaluation only: memory-bound, one element per thread. Not yet run on a GPU.
#include "common/map.cuh"
#include "common/math.cuh"
#include "core/targets.h"
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

/// taken[h][f] = whether the mean attention of head h on the first key f of a sequence, over the tokens of
/// the sequence that are not padding, is above the threshold. Grid (heads, tokens): a block with work per
/// head and sequence. sink (H), or extra (H, T), or neither.
template <class T>
__global__ void __launch_bounds__(kBlock)
    sink_heads_kernel(int* taken, const float* lse, const float* z0, const T* sink, const float* extra,
                      const int* first_key, const int* targets, int64_t begin, int64_t tokens,
                      double threshold) {
  const int64_t h = blockIdx.x, first = begin + blockIdx.y;
  if (first_key[first] != first) return;
  double sum = 0, count = 0;
  for (int64_t t = first + threadIdx.x; t < tokens && first_key[t] == first; t += kBlock) {
    if (targets[t] == kPadding) continue;
    count += 1;
    const float l = lse[h * tokens + t], x = z0[h * tokens + t] - l;
    const float share = extra  ? sigmoid(l - extra[h * tokens + t])
                        : sink ? sigmoid(l - to_float(sink[h]))
                               : 1.f;
    sum += static_cast<double>(expf(x > 0 ? 0.f : x) * share);
  }
  sum = block_sum<kBlock>(sum);
  count = block_sum<kBlock>(count);
  if (threadIdx.x == 0) taken[h * tokens + first] = sum > threshold * count ? 1 : 0;
}

/// Grid (heads, tokens), from token `begin` on.
template <class T>
__global__ void __launch_bounds__(kBlock)
    take_heads_kernel(T* o, const T* other, const int* taken, const int* first_key, int64_t begin,
                      int64_t tokens, int64_t depth) {
  const int64_t token = begin + blockIdx.y;
  if (!taken[blockIdx.x * tokens + first_key[token]]) return;
  const int64_t at = (token * gridDim.x + blockIdx.x) * depth;
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
                     const Tensor& sink, const Tensor& first_key, const Tensor& targets, double threshold) {
  const int64_t tokens = o.dim(0), heads = o.dim(1);
  ScratchScope scratch(ctx.scratch);
  const bool by_query = sink && sink.rank == 2;
  const Tensor taken = scratch.alloc("sink heads", DType::i32, {heads, tokens});
  if (ctx.dry_run || o.numel() == 0) return;
  dispatch_storage("take_sink_heads", o, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const int* const first = device_data<int>(first_key);
    const auto over_tokens = [&](auto&& with) {
      for (int64_t t = 0; t < tokens; t += 32768) {
        const auto count = static_cast<unsigned>(std::min<int64_t>(tokens - t, 32768));
        with(t, LaunchConfig{.grid = dim3(static_cast<unsigned>(heads), count), .block = dim3(kBlock)});
      }
    };
    over_tokens([&](int64_t begin, const LaunchConfig& grid) {
      launch(ctx, "take_sink_heads", grid, sink_heads_kernel<T>, device_data<int>(taken),
             static_cast<const float*>(device_data<float>(lse)),
             static_cast<const float*>(device_data<float>(z0)),
             sink && !by_query ? static_cast<const T*>(device_data<T>(sink)) : nullptr,
             by_query ? static_cast<const float*>(device_data<float>(sink)) : nullptr, first,
             static_cast<const int*>(device_data<int>(targets)), begin, tokens, threshold);
    });
    over_tokens([&](int64_t begin, const LaunchConfig& grid) {
      launch(ctx, "take_sink_heads", grid, take_heads_kernel<T>, device_data<T>(o),
             static_cast<const T*>(device_data<T>(other)), static_cast<const int*>(device_data<int>(taken)),
             first, begin, tokens, o.dim(2));
    });
  });
}

}  // namespace sluice::cuda
