// First keys of queries. Negligible beside attention: one thread per query. Not yet run on a GPU.
#include "attention/visible_keys.cuh"
#include "ops/window.h"

namespace sluice::cuda {
namespace {

constexpr int kBlock = 256;

__global__ void __launch_bounds__(kBlock)
    window_first_key_kernel(int* out, const int* first_key, int64_t queries, int64_t offset, int64_t window) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (t >= queries) return;
  const int64_t begin = t + offset - window + 1;
  out[t] = begin > first_key[t] ? static_cast<int>(begin) : first_key[t];
}

/// Grid (blocks of queries, heads).
__global__ void __launch_bounds__(kBlock)
    hide_first_logits_kernel(float* z0, const int* first_key, const int* window_first, int64_t queries) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (t < queries && window_first[t] > first_key[t]) z0[blockIdx.y * queries + t] = -INFINITY;
}

__global__ void __launch_bounds__(kBlock)
    absolute_first_key_kernel(int* out, const int* first_key, const int* own_key, int64_t queries) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (t < queries) out[t] = first_key[t] + own_key[t] - static_cast<int>(t);
}

}  // namespace

void window_first_key(Context& ctx, Tensor out, const Tensor& first_key, int64_t keys, int64_t window) {
  if (ctx.dry_run || first_key.numel() == 0) return;
  const int64_t queries = first_key.numel();
  launch(ctx, "window_first_key", {.grid = dim3(blocks_for(queries, kBlock)), .block = dim3(kBlock)},
         window_first_key_kernel, device_data<int>(out), static_cast<const int*>(device_data<int>(first_key)),
         queries, keys - queries, window);
}

void hide_first_logits(Context& ctx, Tensor z0, const Tensor& first_key, const Tensor& window_first) {
  if (ctx.dry_run || z0.numel() == 0) return;
  const int64_t queries = z0.dim(1);
  launch(ctx, "hide_first_logits",
         {.grid = dim3(blocks_for(queries, kBlock), static_cast<unsigned>(z0.dim(0))), .block = dim3(kBlock)},
         hide_first_logits_kernel, device_data<float>(z0),
         static_cast<const int*>(device_data<int>(first_key)),
         static_cast<const int*>(device_data<int>(window_first)), queries);
}

void absolute_first_key(Context& ctx, Tensor out, const Tensor& first_key, const Tensor& own_key) {
  const int64_t queries = first_key.numel();
  if (ctx.dry_run || queries == 0) return;
  launch(ctx, "absolute_first_key", {.grid = dim3(blocks_for(queries, kBlock)), .block = dim3(kBlock)},
         absolute_first_key_kernel, device_data<int>(out),
         static_cast<const int*>(device_data<int>(first_key)),
         static_cast<const int*>(device_data<int>(own_key)), queries);
}

VisibleKeys visible_keys(Context& ctx, ScratchScope& scratch, const Tensor& first_key, const Tensor& own_key,
                         int64_t keys) {
  const OwnKeys own = {own_key ? device_data<int>(own_key) : nullptr, static_cast<int>(first_key.numel()),
                       static_cast<int>(keys)};
  if (!own_key) return {device_data<int>(first_key), own};
  const Tensor first = scratch.like("attention.first_key", first_key);
  cuda::absolute_first_key(ctx, first, first_key, own_key);
  return {device_data<int>(first), own};
}

}  // namespace sluice::cuda
