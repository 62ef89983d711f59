#pragma once
// The sigmoid that activations, gates and attention's epilogue share, in f32; with it a gate's activation and
// its slope are those of ops/gate_activation.h.
#include "common/ptx.cuh"
#include "ops/gate_activation.h"

namespace sluice::cuda {

/// 1 / (1 + e^-x), within a few units in the last place: one ex2 and one reciprocal, both approximate.
DEVICE_INLINE float sigmoid(float x) { return __fdividef(1.f, 1.f + ex2(-1.4426950408889634f * x)); }

}  // namespace sluice::cuda
