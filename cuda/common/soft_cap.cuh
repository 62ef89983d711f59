#pragma once
#include "common/math.cuh"

namespace sluice::cuda {

/// c tanh(x / c), given c and 1 / c; the error is about 2e-7 c for any x.
DEVICE_INLINE float soft_cap(float x, float c, float inverse) {
  return c * (2.f * sigmoid(2.f * inverse * x) - 1.f);
}

}  // namespace sluice::cuda
