#pragma once
// A hash of a tensor's bits that has no order, so that it does not depend on how the tensor is cut into
// parts: of two tensors that differ in one element it is never the same, of others with probability 2^-64.
#include <cstdint>

#include "core/context.h"

namespace sluice {

/// A bijection whose every output bit depends on every input bit (the end of splitmix64; Steele, Lea and
/// Flood 2014).
constexpr uint64_t mixed_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// What element `index` of a tensor adds, of which these are the bits.
constexpr uint64_t bit_term(uint64_t seed, int64_t index, uint64_t bits) {
  return mixed_bits(mixed_bits(seed + static_cast<uint64_t>(index)) ^ bits);
}

/// sum (2) i32, the bytes of a 64-bit integer = the sum modulo 2^64 of bit_term(seed, first + i, bits of
/// x[i]) over x, f32, bf16 or f64. The same on every backend.
void bit_sum(Context& ctx, Tensor sum, const Tensor& x, int64_t first, uint64_t seed);

}  // namespace sluice
