#pragma once
// Counter-based random numbers (Philox4x32-10; Salmon et al. 2011). There is no state to save, and numbers
// are independent of the parallel layout and of threads by construction.
#include <array>
#include <cstdint>
#include <string_view>

namespace sluice {

/// The 128-bit output block for (key, counter).
std::array<uint32_t, 4> philox(std::array<uint32_t, 2> key, std::array<uint32_t, 4> counter);

/// A stream of random numbers: element i is a pure function of (seed, stream, i).
class RandomStream {
 public:
  RandomStream(uint64_t seed, uint64_t stream);
  RandomStream(uint64_t seed, std::string_view stream_name);  // stream = hash of the name

  uint64_t bits(uint64_t i) const;
  double uniform(uint64_t i) const;  // in (0, 1)
  double normal(uint64_t i) const;   // Box-Muller

 private:
  uint64_t seed_, stream_;
};

/// A pseudorandom bijection of [0, n): element i of a shuffled order, in O(1) memory (Feistel network with
/// cycle walking).
uint64_t permute_index(uint64_t i, uint64_t n, uint64_t key);

}  // namespace sluice
