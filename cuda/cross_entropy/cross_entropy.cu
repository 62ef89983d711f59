// Output head and cross-entropy in chunks of rows (ops/cross_entropy.h): product, softmax in place, two
// products. The time is that of the products; between them the logits of a chunk are read twice and written
// once. Logits have the model's storage type, bf16 or f32, with rows padded to 128 bytes so that a vocabulary
// of any size gets aligned products and 16-byte accesses; arithmetic on them is f32. The gradient of the
// logits overwrites them.
#include <algorithm>

#include "cross_entropy/softmax.cuh"
#include "matmul.h"
#include "ops/cross_entropy.h"
#include "ops/elementwise.h"

namespace sluice::cuda {
namespace {

/// Combines the threads' values in a deterministic order; every thread gets the result of the row.
template <int kThreads>
DEVICE_INLINE MaxSum join_block(MaxSum v) {
  STATIC_SMEM(MaxSum, partial, [kThreads / 32]);
  v = join_warp(v);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  MaxSum total = partial[0];
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) total = join(total, partial[i]);
  return total;
}

/// One block per row, a vector of 16 bytes per thread and access, four in flight. Bound by memory. The first
/// pass finds maximum and sum together; the second goes backwards, over what the caches saw last. The last
/// rows come first, for they are what the product before left in the cache. A block of 1024 threads has a
/// multiprocessor to itself, so that the rows at work (132 x 304 KB at 151,936 words) stay within 50 MB of
/// cache. Not yet run on a GPU.
template <bool kGradient, bool kCapped, bool kZLoss, int kThreads, class T>
__global__ void __launch_bounds__(kThreads) softmax_rows(SoftmaxRows<T> p) {
  constexpr int kWidth = kVecWidth<T>, kUnroll = 4;
  const int64_t row = p.rows - 1 - blockIdx.x;
  T* x = p.logits + row * p.stride;
  const int vocabulary = p.vocabulary, vectors = vocabulary / kWidth, tail = vectors * kWidth;
  const int thread = static_cast<int>(threadIdx.x);
  const int target = target_of(p, row, thread == 0);
  if (target < 0) {  // the whole block returns
    no_loss<kGradient, kZLoss, kThreads>(p, row, thread);
    return;
  }
  const Logits<kCapped> logits(p.cap);
  const float at_target = logits.value(to_float(x[target]));
  MaxSum mine = {-FLT_MAX, 0};
  for (int i = thread; i < vectors; i += kUnroll * kThreads) {
    Vec16<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (i + u * kThreads < vectors) v[u] = load_vec<kWidth>(x + (i + u * kThreads) * kWidth);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u * kThreads >= vectors) break;
      float y[kWidth];
      logits.values(y, v[u]);
      mine = add_logits(mine, y);
    }
  }
  for (int i = tail + thread; i < vocabulary; i += kThreads)
    mine = join(mine, {logits.value(to_float(x[i])), 1});
  const MaxSum all = join_block<kThreads>(mine);
  if (thread == 0) store_loss<kZLoss>(p, row, all, at_target);

  if constexpr (kGradient) {
    const LogitGradient<kCapped, kZLoss> gradient(p, all, logits.inverse);
    for (int i = tail + thread; i < vocabulary; i += kThreads)
      x[i] = from_float<T>(gradient(logits.value(to_float(x[i])), i == target));
    for (int i = vectors - 1 - thread; i >= 0; i -= kUnroll * kThreads) {
      Vec16<T> v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (i >= u * kThreads) v[u] = load_vec<kWidth>(x + (i - u * kThreads) * kWidth);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i < u * kThreads) break;
        const int first = (i - u * kThreads) * kWidth;
        float y[kWidth];
        logits.values(y, v[u]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) y[j] = gradient(y[j], j == target - first);
        store_vec(x + first, from_floats<T>(y));
      }
    }
  }
}

/// Rows of a chunk, from shapes alone. dW is read and written once per chunk, which costs as much as the
/// products of about 700 rows: chunks have up to 8192 rows and are of equal size, as far as their logits take
/// no more than 1 GiB or twice the bytes of dW, whichever is more.
int64_t chunk_rows(int64_t rows, int64_t row_bytes, int64_t dweight_bytes) {
  constexpr int64_t kLogitBytes = int64_t{1} << 30, kMostRows = 8192, kMultiple = 128;
  const int64_t bytes = std::max(kLogitBytes, 2 * dweight_bytes);
  const int64_t fitting = std::max(kMultiple, bytes / row_bytes / kMultiple * kMultiple);
  const int64_t most = std::min(fitting, kMostRows), chunks = (rows + most - 1) / most;
  const int64_t even = (rows + chunks - 1) / chunks;
  return std::min(rows, (even + kMultiple - 1) / kMultiple * kMultiple);
}

template <bool kGradient>
void softmax(Context& ctx, const char* op, const Tensor& losses, const Tensor& logits, int64_t stride,
             const Tensor& targets, int64_t vocabulary, const Tensor& gradient_scale, double soft_cap,
             double z_coefficient, const Tensor& z_squares) {
  const int64_t rows = losses.dim(0);
  dispatch_storage(op, logits, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    const SoftmaxRows<T> p = {device_data<float>(losses),
                              device_data<T>(logits),
                              stride,
                              device_data<int>(targets),
                              rows,
                              static_cast<int>(vocabulary),
                              device_data<double>(gradient_scale),
                              static_cast<float>(soft_cap),
                              static_cast<float>(z_coefficient),
                              device_data<float>(z_squares),
                              kernel_status(ctx)};
    constexpr int kFew = 256, kMany = kRowThreads, kManyZ = kRowThreadsZ;
    const bool many = vocabulary > 8 * kFew * kVecWidth<T>, capped = soft_cap > 0,
               with_z = z_squares || z_coefficient != 0;
    // A loss alone reads its row once anyway.
    if constexpr (kGradient && std::is_same_v<T, nv_bf16>)
      if (compute_capability(ctx) == 90 && softmax_rows_hopper(ctx, op, p, capped, with_z)) return;
    const LaunchConfig config{dim3(static_cast<unsigned>(rows)), dim3(!many    ? kFew
                                                                      : with_z ? kManyZ
                                                                               : kMany)};
    auto kernel = many ? (capped ? softmax_rows<kGradient, true, false, kMany, T>
                                 : softmax_rows<kGradient, false, false, kMany, T>)
                       : (capped ? softmax_rows<kGradient, true, false, kFew, T>
                                 : softmax_rows<kGradient, false, false, kFew, T>);
    if constexpr (kGradient) {
      if (with_z)
        kernel = many ? (capped ? softmax_rows<true, true, true, kManyZ, T>
                                : softmax_rows<true, false, true, kManyZ, T>)
                      : (capped ? softmax_rows<true, true, true, kFew, T>
                                : softmax_rows<true, false, true, kFew, T>);
    }
    launch(ctx, op, config, kernel, p);
  });
}

template <bool kGradient>
void run(Context& ctx, const char* op, const Tensor& losses, const Tensor& dhidden, const Tensor& dweight,
         const Tensor& hidden, const LinearWeight& head, const Tensor& targets, const Tensor& gradient_scale,
         double soft_cap, const LogitZLoss& z, Into into_dweight) {
  check_storage(op, hidden);
  const DType type = hidden.dtype;
  const int64_t rows = hidden.dim(0), width = hidden.dim(1), vocabulary = head.value.dim(0);
  if (rows == 0) {
    if (dweight && into_dweight == Into::overwrite) fill(ctx, dweight, 0);
    return;
  }
  const int64_t multiple = 128 / dtype_size(type), stride = (vocabulary + multiple - 1) / multiple * multiple;
  const int64_t chunk =
      chunk_rows(rows, stride * dtype_size(type), vocabulary * width * dtype_size(DType::f32));

  ScratchScope t(ctx.scratch);
  const Tensor logits = t.alloc("logits", type, {chunk, stride});
  for (int64_t row = 0; row < rows; row += chunk) {
    const int64_t count = std::min(chunk, rows - row);
    const Tensor x = hidden.rows(row, count);
    GpuProduct forward;
    forward.in = forward.out = type;
    forward.m = count, forward.n = vocabulary, forward.k = width;
    forward.b_transposed = true, forward.c_stride = stride;
    multiply(ctx, forward, x.data, head.value.data, logits.data);
    if (!ctx.dry_run)
      softmax<kGradient>(ctx, op, losses.rows(row, count), logits, stride, targets.rows(row, count),
                         vocabulary, gradient_scale, soft_cap, z.coefficient,
                         z.squares ? z.squares.rows(row, count) : Tensor());
    if constexpr (kGradient) {
      GpuProduct input;
      input.in = input.out = type;
      input.m = count, input.n = width, input.k = vocabulary;
      input.a_stride = stride;
      multiply(ctx, input, logits.data, head.value.data, dhidden.rows(row, count).data);
      if (!dweight) continue;
      GpuProduct weight;
      weight.in = type, weight.out = DType::f32;
      weight.m = vocabulary, weight.n = width, weight.k = count;
      weight.a_transposed = true, weight.a_stride = stride;
      weight.accumulate = into_dweight == Into::add || row > 0;
      multiply(ctx, weight, logits.data, x.data, dweight.data);
    }
  }
}

}  // namespace

void cross_entropy_forward(Context& ctx, Tensor losses, const Tensor& hidden, const LinearWeight& head,
                           const Tensor& targets, double soft_cap) {
  run<false>(ctx, "cross_entropy_forward", losses, {}, {}, hidden, head, targets, {}, soft_cap, {},
             Into::add);
}

void cross_entropy_forward_backward(Context& ctx, Tensor losses, Tensor dhidden, Tensor dweight,
                                    const Tensor& hidden, const LinearWeight& head, const Tensor& targets,
                                    const Tensor& gradient_scale, double soft_cap, const LogitZLoss& z,
                                    Into into_dweight) {
  run<true>(ctx, "cross_entropy_forward_backward", losses, dhidden, dweight, hidden, head, targets,
            gradient_scale, soft_cap, z, into_dweight);
}

}  // namespace sluice::cuda
