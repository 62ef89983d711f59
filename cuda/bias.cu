// Memory-bound. Forward and the factors' gradients: a warp per row, which finds the row's bias by bisection
// (at most ten reads that all its lanes share). The biases' gradient: a block per bias and 32 columns, whose
// 16 warps take every sixteenth row; their sums are added in order. Not yet run on a GPU.
#include "common/rows.cuh"
#include "ops/bias.h"

namespace sluice::cuda {
namespace {

constexpr int kRowThreads = 256, kRowsOfBlock = kRowThreads / 32;

/// BiasRows in terms of pointers.
struct RowsOf {
  const int *offsets, *slots, *index;
  const float* weights;
  int groups, all;  // rows, where there are no offsets

  RowsOf(const BiasRows& rows, const Tensor& row_index, const Tensor& y)
      : offsets(device_data<int>(rows.offsets)),
        slots(device_data<int>(rows.slots)),
        index(device_data<int>(row_index)),
        weights(device_data<float>(rows.weights)),
        groups(rows.offsets ? static_cast<int>(rows.offsets.dim(0) - 1) : 1),
        all(static_cast<int>(row_index ? row_index.dim(0) : y.dim(0))) {}

  DEVICE_INLINE int begin(int g) const { return offsets ? offsets[g] : 0; }
  DEVICE_INLINE int end(int g) const { return offsets ? offsets[g + 1] : all; }
  DEVICE_INLINE float weight(int r) const { return weights ? weights[slots[r]] : 1.f; }
  DEVICE_INLINE int64_t at(int r) const { return index ? index[r] : r; }
  /// The bias of a row; -1: none.
  DEVICE_INLINE int group(int r) const {
    if (r < begin(0) || r >= end(groups - 1)) return -1;
    int low = 0, high = groups - 1;  // the first that ends behind r
    while (low < high) {
      const int middle = (low + high) / 2;
      if (end(middle) > r)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
};

DEVICE_INLINE int warp_row() {
  return static_cast<int>(blockIdx.x) * kRowsOfBlock + static_cast<int>(threadIdx.x) / 32;
}

template <class Y, class B>
__global__ void __launch_bounds__(kRowThreads)
    bias_forward_kernel(Y* y, const B* bias, int width, RowsOf of) {
  const int r = warp_row(), g = of.group(r);
  if (g < 0) return;
  const float weight = of.weight(r);
  Y* const to = y + static_cast<int64_t>(r) * width;
  const B* const from = bias + static_cast<int64_t>(g) * width;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < width; i += 32)
    to[i] = from_float<Y>(to_float(to[i]) + weight * to_float(from[i]));
}

template <class T>
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    bias_backward_kernel(float* dbias, const T* dy, int width, RowsOf of) {
  STATIC_SMEM(float, partial, [kSumRows][kSumColumns]);
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y), g = blockIdx.y;
  const int column = static_cast<int>(blockIdx.x) * kSumColumns + x, last = of.end(g);
  float sum = 0;
  if (column < width) {
#pragma unroll 4
    for (int r = of.begin(g) + y; r < last; r += kSumRows)
      sum += of.weight(r) * to_float(dy[of.at(r) * width + column]);
  }
  partial[y][x] = sum;
  __syncthreads();
  if (y == 0 && column < width) {
#pragma unroll
    for (int i = 1; i < kSumRows; ++i) sum += partial[i][x];
    dbias[static_cast<int64_t>(g) * width + column] += sum;
  }
}

template <class T>
__global__ void __launch_bounds__(kRowThreads)
    bias_backward_weights_kernel(float* dweights, const T* dy, const T* bias, int width, RowsOf of) {
  const int r = warp_row(), g = of.group(r), lane = static_cast<int>(threadIdx.x) % 32;
  float sum = 0;
  if (g >= 0) {
    const T *const from = dy + of.at(r) * width, *const b = bias + static_cast<int64_t>(g) * width;
    for (int i = lane; i < width; i += 32) sum += to_float(from[i]) * to_float(b[i]);
  }
  sum = GroupSum<kRowThreads, 32>()(sum);
  if (g >= 0 && lane == 0) dweights[of.slots[r]] += sum;
}

LaunchConfig row_launch(const RowsOf& of) {
  return {.grid = dim3(blocks_for(of.all, kRowsOfBlock)), .block = dim3(kRowThreads)};
}

}  // namespace

void bias_forward(Context& ctx, Tensor y, const Tensor& bias, const BiasRows& rows) {
  if (ctx.dry_run || y.numel() == 0) return;
  const RowsOf of(rows, Tensor(), y);
  const int width = static_cast<int>(y.dim(1));
  dispatch_storage("bias_forward", bias, [&](auto* tag) {
    using B = std::remove_pointer_t<decltype(tag)>;
    if (y.dtype == bias.dtype)
      launch(ctx, "bias_forward", row_launch(of), bias_forward_kernel<B, B>, device_data<B>(y),
             device_data<B>(bias), width, of);
    else
      launch(ctx, "bias_forward", row_launch(of), bias_forward_kernel<float, B>, device_data<float>(y),
             device_data<B>(bias), width, of);
  });
}

void bias_backward(Context& ctx, Tensor dbias, const Tensor& dy, const Tensor& index, const BiasRows& rows) {
  const RowsOf of(rows, index, dy);
  if (ctx.dry_run || of.all == 0 || dy.dim(1) == 0) return;
  const int width = static_cast<int>(dy.dim(1));
  dispatch_storage("bias_backward", dy, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    launch(ctx, "bias_backward",
           {.grid = dim3(blocks_for(width, kSumColumns), static_cast<unsigned>(of.groups)),
            .block = dim3(kSumColumns, kSumRows)},
           bias_backward_kernel<T>, device_data<float>(dbias), device_data<T>(dy), width, of);
  });
}

void bias_backward_weights(Context& ctx, Tensor dweights, const Tensor& dy, const Tensor& index,
                           const Tensor& bias, const BiasRows& rows) {
  const RowsOf of(rows, index, dy);
  if (ctx.dry_run || of.all == 0) return;
  const int width = static_cast<int>(dy.dim(1));
  dispatch_storage("bias_backward_weights", dy, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    launch(ctx, "bias_backward_weights", row_launch(of), bias_backward_weights_kernel<T>,
           device_data<float>(dweights), device_data<T>(dy), device_data<T>(bias), width, of);
  });
}

}  // namespace sluice::cuda
