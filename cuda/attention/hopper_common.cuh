#pragma once
// Common parts of attention forward and backward for Hopper.
#include <algorithm>
#include <cstdint>

#include "common/ptx.cuh"

namespace sluice::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

/// What 65536 registers come to per thread of a block of three warpgroups, in steps of eight. setmaxnreg
/// moves registers between warpgroups but cannot exceed the number that the block started with: a larger
/// increase would wait forever.
constexpr int kRegistersAtEntry = 65536 / 384 / 8 * 8;

/// Makes a value that is uniform over lanes known as such to the compiler: wgmma must not be in a path that
/// it considers divergent (ptxas would serialise the products, C7520).
DEVICE_INLINE int uniform(int x) { return __shfl_sync(kFullWarp, x, 0); }

/// Position in a ring of shared memory stages. A consumer waits for its full barrier with `phase`, a producer
/// for its empty one with `phase ^ 1`, which the first round passes at once.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned phase = 0;
  DEVICE_INLINE void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

/// Number of key heads to process at a time so that the data they read repeatedly (bytes per head) stays in
/// the L2 cache: 50 MB on an H100, part of which other data occupies.
inline int heads_per_section(int64_t bytes_per_head, int kv_heads) {
  const int64_t fit = (int64_t{32} << 20) / std::max<int64_t>(bytes_per_head, 1);
  return static_cast<int>(std::clamp<int64_t>(fit, 1, kv_heads));
}

}  // namespace sluice::cuda
