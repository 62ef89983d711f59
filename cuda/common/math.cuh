#pragma once
// Sigmoid functions shared by activations, gates and attention's epilogue. f32 throughout.
#include "common/ptx.cuh"
#include "core/kinds.h"

namespace sluice::cuda {

/// 1 / (1 + e^-x), within a few units in the last place: one ex2 and one reciprocal, both approximate.
DEVICE_INLINE float sigmoid(float x) { return __fdividef(1.f, 1.f + ex2(-1.4426950408889634f * x)); }

/// a(z) and a'(z) of a gate from z and s = sigmoid(z) (ops/gate.h). The activation is uniform within a
/// launch. They are host functions, too, because the host compiler warns of missing cases and nvcc does not.
__host__ DEVICE_INLINE float activate(GateActivation a, float z, float s) {
  switch (a) {
    case GateActivation::sigmoid:
      return s;
    case GateActivation::silu:
      return z * s;
    case GateActivation::identity:
      return z;
    case GateActivation::ns_sigmoid:
      return 0.5f + 0.5f * s;
  }
  __builtin_unreachable();
}
__host__ DEVICE_INLINE float slope_of(GateActivation a, float z, float s) {
  switch (a) {
    case GateActivation::sigmoid:
      return s * (1.f - s);
    case GateActivation::silu:
      return s * (1.f + z * (1.f - s));
    case GateActivation::identity:
      return 1.f;
    case GateActivation::ns_sigmoid:
      return 0.5f * s * (1.f - s);
  }
  __builtin_unreachable();
}

}  // namespace sluice::cuda
