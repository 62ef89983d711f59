// Bound by memory, and only by the rows of padding: a block per token. Not yet run on a GPU.
#include "common/map.cuh"
#include "core/targets.h"
#include "ops/padding.h"

namespace sluice::cuda {
namespace {

constexpr int kBlock = 128;

template <class T>
__global__ void __launch_bounds__(kBlock)
    clear_padding_kernel(T* x, const int* targets, int64_t stride, int64_t row) {
  const int64_t token = blockIdx.x;
  if (targets[token] != kPadding) return;
  for (int64_t i = threadIdx.x; i < row; i += kBlock) x[token * stride + i] = from_float<T>(0.f);
}

}  // namespace

void clear_padding(Context& ctx, Tensor x, const Tensor& targets) {
  if (ctx.dry_run || x.numel() == 0) return;
  dispatch_storage("clear_padding", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    launch(ctx, "clear_padding", {.grid = dim3(static_cast<unsigned>(x.dim(0))), .block = dim3(kBlock)},
           clear_padding_kernel<T>, device_data<T>(x), static_cast<const int*>(device_data<int>(targets)),
           x.stride(), x.numel() / x.dim(0));
  });
}

}  // namespace sluice::cuda
