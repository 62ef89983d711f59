#pragma once
// The random bits of stochastic rounding, equal on every backend.
#include <cstdint>

// Always inlined: files are compiled for several instruction sets, and no copy may be shared between them.
#if defined(__CUDACC__)
#define SLUICE_EVERYWHERE __host__ __device__ __forceinline__
#else
#define SLUICE_EVERYWHERE inline __attribute__((always_inline))
#endif

namespace sluice {

/// Wellons' "lowbias32": every bit of the result depends on every bit of x.
SLUICE_EVERYWHERE uint32_t scramble(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

/// The bf16 of element i, whose f32 is `bits`.
SLUICE_EVERYWHERE uint16_t stochastic_bf16(uint32_t bits, uint32_t i, uint32_t key) {
  // Adding 16 random bits below the last kept bit carries into it with the required probability.
  const uint32_t up = (bits + (scramble(i ^ key) & 0xffffu)) >> 16;
  // A finite number must not be rounded up to infinity, nor a NaN to a number: adding may carry into its
  // sign.
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  const bool keeps = !finite || (up & 0x7f80u) == 0x7f80u;
  const uint32_t quiet = (bits & 0x7fffffffu) > 0x7f800000u ? 0x40u : 0u;
  return static_cast<uint16_t>(keeps ? (bits >> 16) | quiet : up);
}

}  // namespace sluice
