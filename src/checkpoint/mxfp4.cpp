#include "checkpoint/mxfp4.h"

#include <cmath>

namespace sluice {

void mxfp4_values(const unsigned char* blocks, const unsigned char* scales, int64_t count, float* out) {
  constexpr float kValues[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6, -0.0F, -0.5F, -1, -1.5F, -2, -3, -4, -6};
  for (int64_t block = 0; block < count / kMxfp4Block; ++block) {
    const float scale = std::ldexp(1.0F, static_cast<int>(scales[block]) - 127);
    for (int64_t i = block * kMxfp4Block; i < (block + 1) * kMxfp4Block; i += 2) {
      const unsigned char two = blocks[i / 2];
      out[i] = kValues[two & 15] * scale;
      out[i + 1] = kValues[two >> 4] * scale;
    }
  }
}

}  // namespace sluice
