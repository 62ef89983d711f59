#pragma once
// The sigmoid that activations, gates and attention's epilogue share, in f32; with it a gate's activation and
// its slope are those of ops/gate_activation.h. What the tiled softmaxes of attention share.
#include "common/ptx.cuh"
#include "ops/gate_activation.h"

namespace sluice::cuda {

/// 1 / (1 + e^-x), within a few units in the last place: one ex2 and one reciprocal, both approximate.
DEVICE_INLINE float sigmoid(float x) { return __fdividef(1.f, 1.f + ex2(-1.4426950408889634f * x)); }

// ---- softmax over tiles of keys: weights are 2^(score scale - base), and `base` grows with the largest
// score

/// The base for a largest score; 0 for -inf, of a row without visible keys so far.
DEVICE_INLINE float softmax_base(float largest, float scale) {
  return largest == -INFINITY ? 0.0f : __fmul_rn(largest, scale);
}
/// The factor that takes the sums of earlier tiles to `base`. It must be 1 where the largest score stays, for
/// errors multiply over the tiles: so the old base is rounded as the new one was. In one FMA, which the
/// compiler makes of a plain product, the difference is the rounding error of the base.
DEVICE_INLINE float softmax_rescale(float old_largest, float scale, float base) {
  return ex2(__fmul_rn(old_largest, scale) - base);
}
/// The logarithm, to base 2, of the sum of a row's exponentials: of the base, as it was rounded, and of a sum
/// of at least 1.
DEVICE_INLINE float softmax_lse(float largest, float scale, float sum) {
  return __fmul_rn(largest, scale) + fmaxf(lg2(sum), 0.0f);
}

}  // namespace sluice::cuda
