#include "core/random.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace sluice {
namespace {

constexpr uint64_t join(uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; }
constexpr uint32_t low_half(uint64_t x) { return static_cast<uint32_t>(x); }
constexpr uint32_t high_half(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

/// 52 random bits plus one half, scaled: every value is exact and lies strictly within (0, 1).
double open_unit(uint64_t bits) { return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52; }

/// A 64-bit finalizer (Stafford's variant 13 of MurmurHash3's): every input bit reaches every output bit.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::array<uint32_t, 4> block(uint64_t seed, uint64_t stream, uint64_t i) {
  return philox({low_half(seed), high_half(seed)},
                {low_half(i), high_half(i), low_half(stream), high_half(stream)});
}

}  // namespace

std::array<uint32_t, 4> philox(std::array<uint32_t, 2> key, std::array<uint32_t, 4> counter) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0], b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {high_half(b) ^ counter[1] ^ key[0], low_half(b), high_half(a) ^ counter[3] ^ key[1],
               low_half(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

RandomStream::RandomStream(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}
RandomStream::RandomStream(uint64_t seed, std::string_view stream_name)
    : seed_(seed), stream_(XXH64(stream_name.data(), stream_name.size(), 0)) {}

uint64_t RandomStream::bits(uint64_t i) const {
  const auto word = block(seed_, stream_, i);
  return join(word[0], word[1]);
}

double RandomStream::uniform(uint64_t i) const { return open_unit(bits(i)); }

double RandomStream::normal(uint64_t i) const {
  const auto word = block(seed_, stream_, i);
  const double radius = std::sqrt(-2 * std::log(open_unit(join(word[0], word[1]))));
  return radius * std::cos(2 * std::numbers::pi * open_unit(join(word[2], word[3])));
}

uint64_t permute_index(uint64_t i, uint64_t n, uint64_t key) {
  SLUICE_CHECK(n <= uint64_t{1} << 63 && i < n, "permute_index: index {} of {}", i, n);
  if (n == 1) return 0;
  // A Feistel network on [0, 2^bits), bits the least with 2^bits >= n (but 6: tiny halves shuffle badly).
  // Cycle walking: images outside [0, n) are mapped again until one falls inside, which is a bijection of [0,
  // n) and takes fewer than two rounds on average.
  const int bits = std::max(6, static_cast<int>(std::bit_width(n - 1)));
  const int right_bits = bits / 2, left_bits = bits - right_bits;
  const uint64_t left_mask = (uint64_t{1} << left_bits) - 1, right_mask = (uint64_t{1} << right_bits) - 1;
  do {
    uint64_t left = i >> right_bits, right = i & right_mask;
    for (uint64_t round = 0; round < 8; round += 2) {
      left = (left ^ mix(right + mix(key + round))) & left_mask;
      right = (right ^ mix(left + mix(key + round + 1))) & right_mask;
    }
    i = left << right_bits | right;
  } while (i >= n);
  return i;
}

}  // namespace sluice
