#pragma once
#include "common/math.cuh"

namespace sluice::cuda {

/// c tanh(x / c), for c and one over c: off by some 2e-7 c, whatever x is.
DEVICE_INLINE float soft_cap(float x, float c, float inverse) {
  return c * (2.f * sigmoid(2.f * inverse * x) - 1.f);
}

}  // namespace sluice::cuda
