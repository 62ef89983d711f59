// Memory-bound: every element is read once. At most 1024 blocks compute one sum each, which another block
// adds. Integer sums are exact in any order.
#include <algorithm>
#include <type_traits>

#include "common/launch.h"
#include "ops/bit_sum.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1024;

/// The sum over the block, in thread 0.
DEVICE_INLINE uint64_t sum_of_block(uint64_t mine) {
  STATIC_SMEM(uint64_t, sums, [kThreads]);
  sums[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  return sums[0];
}

/// Word: an unsigned integer as wide as an element.
template <class Word>
__global__ void __launch_bounds__(kThreads)
    bit_sum_kernel(uint64_t* partials, const Word* x, int64_t n, int64_t first, uint64_t seed) {
  uint64_t mine = 0;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
#pragma unroll 4
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n; i += stride)
    mine += bit_term(seed, first + i, x[i]);
  mine = sum_of_block(mine);
  if (threadIdx.x == 0) partials[blockIdx.x] = mine;
}

__global__ void __launch_bounds__(kThreads)
    add_partials_kernel(uint64_t* sum, const uint64_t* partials, int count) {
  uint64_t mine = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) mine += partials[i];
  mine = sum_of_block(mine);
  if (threadIdx.x == 0) *sum = mine;
}

}  // namespace

void bit_sum(Context& ctx, Tensor sum, const Tensor& x, int64_t first, uint64_t seed) {
  const int64_t n = x.numel(), blocks = std::min((n + kThreads - 1) / kThreads, kMostBlocks);
  ScratchScope scratch(ctx.scratch);
  const Tensor partials = scratch.alloc("bit_sum_partials", DType::f64, {kMostBlocks});  // 64 bits each
  if (ctx.dry_run) return;
  uint64_t* const partial = device_data<uint64_t>(partials);
  if (blocks > 0)
    dispatch_storage("bit_sum", x, [&](auto* tag) {
      using Word = std::conditional_t<sizeof(*tag) == 4, uint32_t, uint16_t>;
      launch(ctx, "bit_sum", {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads)},
             bit_sum_kernel<Word>, partial, static_cast<const Word*>(device_data<Word>(x)), n, first, seed);
    });
  launch(ctx, "bit_sum", {.grid = dim3(1), .block = dim3(kThreads)}, add_partials_kernel,
         device_data<uint64_t>(sum), static_cast<const uint64_t*>(partial), static_cast<int>(blocks));
}

}  // namespace sluice::cuda
