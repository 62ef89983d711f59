// Memory-bound: a thread per element. Not yet run on a GPU.
#include "common/launch.h"
#include "ops/indexer.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256;

/// Whether a block of `block` tokens that begins at s is complete.
DEVICE_INLINE bool complete(const int* first_key, int64_t tokens, int64_t s, int block) {
  return s + block <= tokens && first_key[s + block - 1] == first_key[s];
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    block_means_kernel(T* y, const T* x, const int* first_key, int64_t tokens, int depth, int block) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, s = i / depth;
  if (s >= tokens) return;
  float sum = 0;
  if ((s - first_key[s]) % block == 0 && complete(first_key, tokens, s, block))
    for (int b = 0; b < block; ++b) sum += to_float(x[i + static_cast<int64_t>(b) * depth]);
  y[i] = from_float<T>(sum / static_cast<float>(block));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    block_means_backward_kernel(T* dx, const T* dy, const int* first_key, int64_t tokens, int depth,
                                int block) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, s = i / depth;
  if (s >= tokens) return;
  const int64_t start = s - (s - first_key[s]) % block;
  const bool seen = complete(first_key, tokens, start, block);
  dx[i] = from_float<T>(seen ? to_float(dy[start * depth + i % depth]) / static_cast<float>(block) : 0.0f);
}

}  // namespace

void block_means(Context& ctx, Tensor y, const Tensor& x, const Tensor& first_key, int64_t block) {
  dispatch_storage("block_means", x, [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    if (ctx.dry_run || x.numel() == 0) return;
    launch(ctx, "block_means", {.grid = dim3(blocks_for(x.numel(), kThreads)), .block = dim3(kThreads)},
           block_means_kernel<T>, device_data<T>(y), device_data<T>(x), device_data<int>(first_key), x.dim(0),
           static_cast<int>(x.dim(1)), static_cast<int>(block));
  });
}

void block_means_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& first_key, int64_t block) {
  dispatch_storage("block_means_backward", dy, [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    if (ctx.dry_run || dy.numel() == 0) return;
    launch(ctx, "block_means_backward",
           {.grid = dim3(blocks_for(dy.numel(), kThreads)), .block = dim3(kThreads)},
           block_means_backward_kernel<T>, device_data<T>(dx), device_data<T>(dy),
           device_data<int>(first_key), dy.dim(0), static_cast<int>(dy.dim(1)), static_cast<int>(block));
  });
}

}  // namespace sluice::cuda
