#pragma once
// Order-independent sums of a tensor's bits: a hash that does not depend on how the tensor is sharded, where
// tensors that differ in one element never collide and others do with probability 2^-64; and a plain sum, for
// kernels that have the values in registers anyway.
#include <bit>
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

/// The contribution of element `index`, given its bits. Elements of 32 bits and the first 2^32 indices lie in
/// different halves of the mixed word.
constexpr uint64_t bit_term(uint64_t seed, int64_t index, uint64_t bits) {
  return mixed_bits(bits ^ std::rotl(seed + static_cast<uint64_t>(index), 32));
}

/// sum (2) i32, the bytes of a 64-bit integer = the sum modulo 2^64 of bit_term(seed, first + i, bits of
/// x[i]) over x (f32, bf16 or f64). Equal on every backend.
void bit_sum(Context& ctx, Tensor sum, const Tensor& x, int64_t first, uint64_t seed);

/// The bits of an element as a word; of an f64, its halves added. A change of one bit changes it.
constexpr uint32_t word_bits(float x) { return std::bit_cast<uint32_t>(x); }
constexpr uint32_t word_bits(bf16 x) { return x.bits; }
constexpr uint32_t word_bits(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  return static_cast<uint32_t>(bits) + static_cast<uint32_t>(bits >> 32);
}

/// sum (1) i32 += word_bits of every element of x (f32, bf16 or f64), modulo 2^32. A change of one element is
/// always seen, other changes are missed with probability 2^-32. On a CPU alone.
void word_sum(Context& ctx, Tensor sum, const Tensor& x);

}  // namespace sluice
