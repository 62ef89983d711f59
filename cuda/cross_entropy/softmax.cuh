#pragma once
// What the kernels of the loss share: the maximum and the sum of a row of logits, the row's loss, the
// gradient of a logit. A row's sum is one of kRowThreads parts, part t of vectors t, t + kRowThreads, ...,
// which are joined warp by warp: so it does not depend on how many blocks take a row.
#include <cfloat>

#include "common/launch.h"
#include "common/ptx.cuh"
#include "common/soft_cap.cuh"
#include "core/targets.h"

namespace sluice::cuda {

/// Threads that share a row of many words. With the z-loss a block of 1024 would spill registers.
constexpr int kRowThreads = 1024, kRowThreadsZ = 512;

template <class T>
struct SoftmaxRows {
  float* losses;
  T* logits;  // overwritten by their gradient
  int64_t stride;
  const int* targets;
  int64_t rows;
  int vocabulary;
  const double* gradient_scale;
  float cap, z_coefficient;
  float* z_squares;  // null: not asked for
  KernelStatus* status;
};

/// Losses and gradients of rows of bf16 by clusters of blocks; false where a row is too long for them.
bool softmax_rows_hopper(Context& ctx, const char* op, const SoftmaxRows<nv_bf16>& p, bool capped,
                         bool with_z);

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

/// Running maximum of a row and the sum of exp(x - maximum). Fused multiply-adds are written out: all kernels
/// round alike.
struct alignas(8) MaxSum {
  float max, sum;
};
DEVICE_INLINE MaxSum join(MaxSum a, MaxSum b) {
  const float m = fmaxf(a.max, b.max);
  return {m, fmaf(a.sum, ex2((a.max - m) * kLog2e), b.sum * ex2((b.max - m) * kLog2e))};
}
/// Lane 0's order of a warp's values, for all lanes: fused, a sum joined to another one is not the other to
/// it.
DEVICE_INLINE MaxSum join_warp(MaxSum v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    const MaxSum other = {__shfl_xor_sync(kFullWarp, v.max, offset),
                          __shfl_xor_sync(kFullWarp, v.sum, offset)};
    v = join(v, other);
  }
  return {__shfl_sync(kFullWarp, v.max, 0), __shfl_sync(kFullWarp, v.sum, 0)};
}
template <int kN>
DEVICE_INLINE MaxSum add_logits(MaxSum mine, const float (&y)[kN]) {
  float m = mine.max;
#pragma unroll
  for (int j = 0; j < kN; ++j) m = fmaxf(m, y[j]);
  float s = fmaf(mine.sum, ex2((mine.max - m) * kLog2e), ex2((y[0] - m) * kLog2e));
#pragma unroll
  for (int j = 1; j < kN; ++j) s += ex2((y[j] - m) * kLog2e);
  return {m, s};
}

/// A logit as it was stored is what the product gave; the cap is of its f32 value, wherever that is read.
template <bool kCapped>
struct Logits {
  float cap, inverse;
  DEVICE_INLINE explicit Logits(float c) : cap(c), inverse(kCapped ? 1.f / c : 0.f) {}
  DEVICE_INLINE float value(float stored) const {
    if constexpr (kCapped)
      return soft_cap(stored, cap, inverse);
    else
      return stored;
  }
  template <class T, int kN>
  DEVICE_INLINE void values(float (&y)[kN], const Vec<T, kN>& stored) const {
    to_floats(y, stored);
#pragma unroll
    for (int j = 0; j < kN; ++j) y[j] = value(y[j]);
  }
};

/// The target of a row; negative where it has no loss. One outside of the vocabulary is reported.
template <class T>
DEVICE_INLINE int target_of(const SoftmaxRows<T>& p, int64_t row, bool reports) {
  const int target = p.targets[row];
  if (target >= kPadding && target < p.vocabulary) return target;
  if (reports) report(p.status, KernelStatus::target_outside_vocabulary, target);
  return kNoTarget;
}

/// A row without a loss, by threads `thread` of kThreads: its gradient is zero.
template <bool kGradient, bool kZLoss, int kThreads, class T>
DEVICE_INLINE void no_loss(const SoftmaxRows<T>& p, int64_t row, int thread) {
  constexpr int kWidth = kVecWidth<T>;
  if (thread == 0) {
    p.losses[row] = 0;
    if (kZLoss && p.z_squares) p.z_squares[row] = 0;
  }
  if constexpr (kGradient) {
    T* const x = p.logits + row * p.stride;
    const int vectors = p.vocabulary / kWidth;
    Vec16<T> zero;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) zero.v[j] = from_float<T>(0);
    for (int i = thread; i < vectors; i += kThreads) store_vec(x + i * kWidth, zero);
    for (int i = vectors * kWidth + thread; i < p.vocabulary; i += kThreads) x[i] = from_float<T>(0);
  }
}

template <bool kZLoss, class T>
DEVICE_INLINE void store_loss(const SoftmaxRows<T>& p, int64_t row, MaxSum all, float at_target) {
  const float log_sum = lg2(all.sum) * kLn2;
  p.losses[row] = log_sum - (at_target - all.max);
  if (kZLoss && p.z_squares) p.z_squares[row] = (log_sum + all.max) * (log_sum + all.max);
}

/// The gradient of a logit of a row.
template <bool kCapped, bool kZLoss>
struct LogitGradient {
  float max, scale, factor, inverse;
  template <class T>
  DEVICE_INLINE LogitGradient(const SoftmaxRows<T>& p, MaxSum all, float inverse_cap)
      : max(all.max), scale(static_cast<float>(*p.gradient_scale)), inverse(inverse_cap) {
    factor = scale / all.sum;
    if constexpr (kZLoss) factor *= 1.f + 2.f * p.z_coefficient * (lg2(all.sum) * kLn2 + all.max);
  }
  /// y: the logit's value.
  DEVICE_INLINE float operator()(float y, bool is_target) const {
    const float e = ex2((y - max) * kLog2e) * factor, d = is_target ? e - scale : e;
    if constexpr (kCapped)
      return d * (1.f - y * inverse * (y * inverse));
    else
      return d;
  }
};

}  // namespace sluice::cuda
