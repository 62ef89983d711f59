// An extra key behind attention: every pass reads the heads once, with one warp per row (token, head), and is
// bound by memory. Sums over tokens take two steps, chunks of tokens and then the chunks in order, so that
// bits never change. Not yet run on a GPU.
#include "common/math.cuh"
#include "common/rows.cuh"
#include "ops/extra_key.h"

namespace sluice::cuda {
namespace {

constexpr int kBlock = 256, kWarps = kBlock / 32;
constexpr int64_t kChunk = 128;  // tokens

template <class T>
struct Arguments {
  const T *q, *o, *dy, *key, *value;  // value may be null
  const float *lse, *logits, *dlse_in;
  T *y, *d_o, *dq;
  float *logits_out, *dlse;
  int64_t tokens;
  int heads, group, depth;  // group: heads that share a row of key and value
  float scale;
};

/// The row of a warp; `real` is the same for its whole warp.
struct Row {
  int64_t row, at, statistic, extra;
  int lane;
  bool real;

  template <class T>
  DEVICE_INLINE explicit Row(const Arguments<T>& a) {
    row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    lane = static_cast<int>(threadIdx.x % 32);
    real = row < a.tokens * a.heads;
    const int64_t token = row / a.heads, head = row % a.heads;
    at = row * a.depth, statistic = head * a.tokens + token, extra = head / a.group * a.depth;
  }
};

template <class T>
__global__ void __launch_bounds__(kBlock) extra_key_logits_kernel(Arguments<T> a) {
  const Row r(a);
  if (!r.real) return;
  float sum = 0;
  for (int d = r.lane; d < a.depth; d += 32) sum += to_float(a.q[r.at + d]) * to_float(a.key[r.extra + d]);
  sum = warp_sum(sum);
  if (r.lane == 0) a.logits_out[r.statistic] = a.scale * sum;
}

template <class T>
__global__ void __launch_bounds__(kBlock) extra_key_forward_kernel(Arguments<T> a) {
  const Row r(a);
  if (!r.real) return;
  const float x = a.lse[r.statistic] - a.logits[r.statistic], share = sigmoid(x), rest = sigmoid(-x);
  for (int d = r.lane; d < a.depth; d += 32) {
    const float v = a.value ? rest * to_float(a.value[r.extra + d]) : 0.0f;
    a.y[r.at + d] = from_float<T>(share * to_float(a.o[r.at + d]) + v);
  }
}

template <class T>
__global__ void __launch_bounds__(kBlock) extra_key_backward_kernel(Arguments<T> a) {
  const Row r(a);
  if (!r.real) return;
  const float x = a.lse[r.statistic] - a.logits[r.statistic], share = sigmoid(x), rest = sigmoid(-x);
  float sum = 0;
  for (int d = r.lane; d < a.depth; d += 32) {
    const float dy = to_float(a.dy[r.at + d]), v = a.value ? to_float(a.value[r.extra + d]) : 0.0f;
    sum += dy * (to_float(a.o[r.at + d]) - v);
    a.d_o[r.at + d] = from_float<T>(share * dy);
  }
  sum = warp_sum(sum);
  if (r.lane == 0) a.dlse[r.statistic] = share * rest * sum;
}

template <class T>
__global__ void __launch_bounds__(kBlock) extra_key_dq_kernel(Arguments<T> a) {
  const Row r(a);
  if (!r.real) return;
  const float factor = -a.scale * a.dlse_in[r.statistic];
  for (int d = r.lane; d < a.depth; d += 32)
    a.dq[r.at + d] = from_float<T>(to_float(a.dq[r.at + d]) + factor * to_float(a.key[r.extra + d]));
}

/// partial (chunks, Hx, D) = sum over a chunk's tokens, and heads of the row, of w x, with w = sigmoid(logits
/// - lse) for the value's gradient and -scale dlse for the key's. Grid (Hx, chunks); a thread takes channels.
template <class T, bool kValue>
__global__ void __launch_bounds__(kBlock) extra_key_sums_kernel(float* partial, Arguments<T> a) {
  const int row = static_cast<int>(blockIdx.x);
  const T* const x = kValue ? a.dy : a.q;
  const int64_t begin = blockIdx.y * kChunk, end = begin + kChunk < a.tokens ? begin + kChunk : a.tokens;
  for (int d = static_cast<int>(threadIdx.x); d < a.depth; d += kBlock) {
    float sum = 0;
    for (int64_t t = begin; t < end; ++t)
      for (int h = row * a.group; h < (row + 1) * a.group; ++h) {
        const int64_t i = h * a.tokens + t;
        const float w = kValue ? sigmoid(a.logits[i] - a.lse[i]) : -a.scale * a.dlse_in[i];
        sum += w * to_float(x[(t * a.heads + h) * a.depth + d]);
      }
    partial[(static_cast<int64_t>(blockIdx.y) * gridDim.x + row) * a.depth + d] = sum;
  }
}

int64_t chunks_of(const Tensor& x) { return (x.dim(0) + kChunk - 1) / kChunk; }

/// x: (T, H, D); rows: (Hx, D), or empty.
template <class T>
Arguments<T> arguments(const Tensor& x, const Tensor& rows) {
  Arguments<T> a = {};
  a.tokens = x.dim(0), a.heads = static_cast<int>(x.dim(1)), a.depth = static_cast<int>(x.dim(2));
  a.group = rows ? static_cast<int>(x.dim(1) / rows.dim(0)) : 1;
  return a;
}

LaunchConfig row_config(const Tensor& x) {
  return {.grid = dim3(blocks_for(x.dim(0) * x.dim(1), kWarps)), .block = dim3(kBlock)};
}

template <class T, bool kValue>
void add_sums(Context& ctx, const Tensor& sums, const Tensor& partial, const Tensor& x,
              const Arguments<T>& a) {
  const int64_t rows = a.heads / a.group;
  launch(
      ctx, "extra_key_sums",
      {.grid = dim3(static_cast<unsigned>(rows), static_cast<unsigned>(chunks_of(x))), .block = dim3(kBlock)},
      extra_key_sums_kernel<T, kValue>, device_data<float>(partial), a);
  column_sums(ctx, "extra_key_sums", device_data<float>(sums), device_data<float>(partial), chunks_of(x),
              rows * a.depth, Into::add);
}

template <class T>
const T* data_or_null(const Tensor& t) {
  return t ? device_data<T>(t) : nullptr;
}

}  // namespace

void extra_key_logits(Context& ctx, Tensor logits, const Tensor& q, const Tensor& key, double scale) {
  if (ctx.dry_run || q.numel() == 0) return;
  dispatch_storage("extra_key_logits", q, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    Arguments<T> a = arguments<T>(q, key);
    a.q = device_data<T>(q), a.key = device_data<T>(key), a.logits_out = device_data<float>(logits);
    a.scale = static_cast<float>(scale);
    launch(ctx, "extra_key_logits", row_config(q), extra_key_logits_kernel<T>, a);
  });
}

void extra_key_forward(Context& ctx, Tensor y, const Tensor& o, const Tensor& lse, const ExtraKey& extra) {
  if (ctx.dry_run || o.numel() == 0) return;
  dispatch_storage("extra_key_forward", o, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    Arguments<T> a = arguments<T>(o, extra.value);
    a.o = device_data<T>(o), a.y = device_data<T>(y), a.value = data_or_null<T>(extra.value);
    a.lse = device_data<float>(lse), a.logits = device_data<float>(extra.logits);
    launch(ctx, "extra_key_forward", row_config(o), extra_key_forward_kernel<T>, a);
  });
}

void extra_key_backward(Context& ctx, Tensor d_o, Tensor dlse, Tensor dvalue, const Tensor& dy,
                        const Tensor& o, const Tensor& lse, const ExtraKey& extra) {
  ScratchScope temporaries(ctx.scratch);
  const Tensor partial = temporaries.alloc("extra_key.dvalue", DType::f32,
                                           {extra.value ? chunks_of(o) * extra.value.numel() : 0});
  if (ctx.dry_run || o.numel() == 0) return;
  dispatch_storage("extra_key_backward", o, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    Arguments<T> a = arguments<T>(o, extra.value);
    a.o = device_data<T>(o), a.dy = device_data<T>(dy), a.value = data_or_null<T>(extra.value);
    a.lse = device_data<float>(lse), a.logits = device_data<float>(extra.logits);
    a.d_o = device_data<T>(d_o), a.dlse = device_data<float>(dlse);
    if (extra.value) add_sums<T, true>(ctx, dvalue, partial, o, a);  // before d_o, which may alias dy
    launch(ctx, "extra_key_backward", row_config(o), extra_key_backward_kernel<T>, a);
  });
}

void extra_key_logits_backward(Context& ctx, Tensor dq, Tensor dkey, const Tensor& dlse, const Tensor& q,
                               const Tensor& key, double scale) {
  ScratchScope temporaries(ctx.scratch);
  const Tensor partial = temporaries.alloc("extra_key.dkey", DType::f32, {chunks_of(q) * key.numel()});
  if (ctx.dry_run || q.numel() == 0) return;
  dispatch_storage("extra_key_logits_backward", q, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    Arguments<T> a = arguments<T>(q, key);
    a.q = device_data<T>(q), a.key = device_data<T>(key), a.dq = device_data<T>(dq);
    a.dlse_in = device_data<float>(dlse), a.scale = static_cast<float>(scale);
    launch(ctx, "extra_key_dq", row_config(q), extra_key_dq_kernel<T>, a);
    add_sums<T, false>(ctx, dkey, partial, q, a);
  });
}

}  // namespace sluice::cuda
