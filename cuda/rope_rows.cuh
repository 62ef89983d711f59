#pragma once
// Rows (T, H, D) that the rotary embedding turns: a group of 4 to 32 lanes takes one token's row of kHeads
// heads at once, lane l the pair of vectors at l kN and D/2 + l kN, so that rotating needs no other lane, and
// the position's cosines and sines, 4 kN bytes each of f32, are read once for all of them.
#include "common/rows.cuh"

namespace sluice::cuda {

constexpr int kRopeBlock = 256;

/// The rows of the table for the positions, and the report of a position outside of it.
struct RopeTable {
  const int* positions;  // (T)
  const float *cos, *sin;
  int64_t size;     // positions in the table
  int half;         // D / 2
  float direction;  // 1, or -1 to rotate back
  KernelStatus* status;

  /// Offset of token t's angles, or -1 for a position outside of the table, which is reported.
  DEVICE_INLINE int64_t row(int64_t t) const {
    const int position = positions[t];
    if (position >= 0 && position < size) return static_cast<int64_t>(position) * half;
    report(status, KernelStatus::position_outside_table, position);
    return -1;
  }
  /// Both 0 for row -1, which gives a rotated vector of 0.
  template <int kN>
  DEVICE_INLINE void load(int64_t row, int i, float (&c)[kN], float (&s)[kN]) const {
    if (row < 0) {
#pragma unroll
      for (int e = 0; e < kN; ++e) c[e] = s[e] = 0;
      return;
    }
    const Vec<float, kN> vc = load_vec<kN>(cos + row + i), vs = load_vec<kN>(sin + row + i);
#pragma unroll
    for (int e = 0; e < kN; ++e) c[e] = vc.v[e], s[e] = vs.v[e] * direction;
  }
};

/// (a, b) turned by the angle.
DEVICE_INLINE void rotate(float& a, float& b, float c, float s) {
  const float turned = a * c - b * s;
  b = b * c + a * s;
  a = turned;
}

/// The norm's backward of a row of 2 half columns, of which a lane has kN of either half: d its gradient,
/// rotated back, x, and the weight. First what is summed, over the row's columns (returned) and over rows
/// (dw); then, with the row's sum gx, d becomes the gradient of x.
template <int kN>
struct NormRow {
  float d[2][kN], x[2][kN], weight[2][kN];

  DEVICE_INLINE float sums(float (&dw)[2][kN], float r) const {
    float gx = 0;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      gx += d[0][e] * x[0][e] * weight[0][e] + d[1][e] * x[1][e] * weight[1][e];
      dw[0][e] += d[0][e] * x[0][e] * r;
      dw[1][e] += d[1][e] * x[1][e] * r;
    }
    return gx;
  }
  DEVICE_INLINE void to_gradient(float gx, float r, int half) {
    const float k = r * r * (gx / static_cast<float>(2 * half));
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      d[0][e] = r * (d[0][e] * weight[0][e] - x[0][e] * k);
      d[1][e] = r * (d[1][e] * weight[1][e] - x[1][e] * k);
    }
  }
};

template <class T>
struct RopeRows {
  T* y;
  int64_t y_row;  // elements from one token's y to the next's
  const T* x;
  RopeTable table;
  int64_t tokens;
  int heads, slices;  // slices of kHeads heads
  Divider per_token;  // by slices
  // norm_rope_forward alone
  float* rstd;
  const T* weight;    // null: ones
  int weight_stride;  // 0, or D for a weight per head
  float eps;
};

template <class T, int kLanes, int kHeads, bool kNorm>
__global__ void __launch_bounds__(kRopeBlock) rope_kernel(RopeRows<T> p) {
  constexpr int kN = kVecWidth<T>;
  const int half = p.table.half, i = static_cast<int>(threadIdx.x) % kLanes * kN;
  const int64_t unit =
      static_cast<int64_t>(blockIdx.x) * (kRopeBlock / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
  const int64_t t = p.per_token.quotient(unit);
  const int first = static_cast<int>(unit - t * p.slices) * kHeads;
  const bool mine = t < p.tokens && i < half;  // every thread stays for the sums over its group
  const int heads = mine ? (p.heads - first < kHeads ? p.heads - first : kHeads) : 0;
  const int64_t row = t * p.heads + first, at = row * 2 * half + i, y_at = t * p.y_row + first * 2 * half + i;
  Vec<T, kN> low[kHeads], high[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < heads) {
      low[h] = load_vec<kN>(p.x + at + h * 2 * half);
      high[h] = load_vec<kN>(p.x + at + h * 2 * half + half);
    }
  }
  float c[kN], s[kN];
  p.table.load(mine ? p.table.row(t) : -1, i, c, s);
  [[maybe_unused]] GroupSum<kRopeBlock, kLanes> group_sum;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float a[kN], b[kN];
    if (h < heads) {
#pragma unroll
      for (int e = 0; e < kN; ++e) a[e] = to_float(low[h].v[e]), b[e] = to_float(high[h].v[e]);
    }
    if constexpr (kNorm) {
      float squares = 0;
      if (h < heads) {
#pragma unroll
        for (int e = 0; e < kN; ++e) squares += a[e] * a[e] + b[e] * b[e];
      }
      const float r = rsqrtf(group_sum(squares) / static_cast<float>(2 * half) + p.eps);
      if (h < heads) {
        if (i == 0) p.rstd[row + h] = r;
        const int64_t weight_at = (first + h) * p.weight_stride + i;
        const Vec<T, kN> wa = load_weight<kN>(p.weight, weight_at),
                         wb = load_weight<kN>(p.weight, weight_at + half);
#pragma unroll
        for (int e = 0; e < kN; ++e)
          a[e] = to_float(wa.v[e]) * (a[e] * r), b[e] = to_float(wb.v[e]) * (b[e] * r);
      }
    }
    if (h < heads) {
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        rotate(a[e], b[e], c[e], s[e]);
        low[h].v[e] = from_float<T>(a[e]), high[h].v[e] = from_float<T>(b[e]);
      }
      store_vec<kN>(p.y + y_at + h * 2 * half, low[h]);
      store_vec<kN>(p.y + y_at + h * 2 * half + half, high[h]);
    }
  }
}

/// Any head size: a warp takes a row, and reads it twice.
template <class T, bool kNorm>
__global__ void __launch_bounds__(kRopeBlock) rope_any_kernel(RopeRows<T> p) {
  const int half = p.table.half, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kRopeBlock / 32) + static_cast<int>(threadIdx.x) / 32;
  if (row >= p.tokens * p.heads) return;  // whole warps
  const int64_t t = row / p.heads;
  const int head = static_cast<int>(row - t * p.heads);
  const T* const x = p.x + row * 2 * half;
  T* const y = p.y + t * p.y_row + head * 2 * half;
  const int64_t angles = p.table.row(t);
  float r = 1;
  if constexpr (kNorm) {
    float squares = 0;
    for (int i = lane; i < 2 * half; i += 32) squares += to_float(x[i]) * to_float(x[i]);
    r = rsqrtf(warp_sum(squares) / static_cast<float>(2 * half) + p.eps);
    if (lane == 0) p.rstd[row] = r;
  }
  for (int i = lane; i < half; i += 32) {
    float a = to_float(x[i]), b = to_float(x[half + i]), c[1], s[1];
    p.table.load(angles, i, c, s);
    if constexpr (kNorm) {
      const int64_t weight_at = static_cast<int64_t>(head) * p.weight_stride + i;
      a = to_float(load_weight<1>(p.weight, weight_at).v[0]) * (a * r);
      b = to_float(load_weight<1>(p.weight, weight_at + half).v[0]) * (b * r);
    }
    rotate(a, b, c[0], s[0]);
    y[i] = from_float<T>(a), y[half + i] = from_float<T>(b);
  }
}

/// Calls body(lanes as std::integral_constant) and returns true if 16-byte vectors fit the halves of a row.
template <class T, class Body>
bool with_rope_lanes(int half, bool vectors, Body&& body) {
  constexpr int kN = kVecWidth<T>;
  if (!vectors || half % kN != 0 || half / kN > 32) return false;
  if (half / kN <= 4)
    body(std::integral_constant<int, 4>());
  else if (half / kN <= 8)
    body(std::integral_constant<int, 8>());
  else if (half / kN <= 16)
    body(std::integral_constant<int, 16>());
  else
    body(std::integral_constant<int, 32>());
  return true;
}

template <bool kNorm, class T>
void launch_rope(Context& ctx, const char* name, RopeRows<T> p) {
  constexpr int kHeads = 4;
  if (p.tokens * p.heads == 0 || p.table.half == 0) return;
  const bool vectors = aligned(p.y, p.x, p.weight, p.table.cos, p.table.sin) && p.y_row % kVecWidth<T> == 0;
  const bool done = with_rope_lanes<T>(p.table.half, vectors, [&](auto lanes) {
    constexpr int kGroups = kRopeBlock / lanes();
    p.slices = (p.heads + kHeads - 1) / kHeads;
    p.per_token = Divider(p.slices);
    launch(ctx, name, {.grid = dim3(blocks_for(p.tokens * p.slices, kGroups)), .block = dim3(kRopeBlock)},
           rope_kernel<T, lanes(), kHeads, kNorm>, p);
  });
  if (!done)
    launch(ctx, name,
           {.grid = dim3(blocks_for(p.tokens * p.heads, kRopeBlock / 32)), .block = dim3(kRopeBlock)},
           rope_any_kernel<T, kNorm>, p);
}

inline RopeTable rope_angles(Context& ctx, const Tensor& positions, const Tensor& cos, const Tensor& sin,
                             float direction) {
  return {device_data<int>(positions),
          device_data<float>(cos),
          device_data<float>(sin),
          cos.dim(0),
          static_cast<int>(cos.dim(1)),
          direction,
          kernel_status(ctx)};
}

}  // namespace sluice::cuda
