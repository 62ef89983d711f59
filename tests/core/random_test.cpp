#include "core/random.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>
#include <unordered_set>
#include <vector>

#include "core/error.h"

using namespace sluice;

TEST_CASE("philox gives the known answers of Random123", "[random]") {
  using Block = std::array<uint32_t, 4>;
  CHECK(philox({0, 0}, {0, 0, 0, 0}) == Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  const uint32_t ones = 0xffffffff;
  CHECK(philox({ones, ones}, {ones, ones, ones, ones}) ==
        Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox({0xa4093822, 0x299f31d0}, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}) ==
        Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("a stream is a pure function of seed, stream and index", "[random]") {
  const RandomStream a(1, 2), same(1, 2), seed(3, 2), stream(1, 3);
  CHECK(a.bits(5) == same.bits(5));
  CHECK(a.bits(5) != a.bits(6));
  CHECK(a.bits(5) != seed.bits(5));
  CHECK(a.bits(5) != stream.bits(5));
  // All 64 bits of each count.
  CHECK(a.bits(5) != a.bits(5 + (uint64_t{1} << 32)));
  CHECK(a.bits(5) != RandomStream(1 + (uint64_t{1} << 32), 2).bits(5));
  CHECK(a.bits(5) != RandomStream(1, 2 + (uint64_t{1} << 32)).bits(5));
  CHECK(RandomStream(1, "data").bits(0) == RandomStream(1, "data").bits(0));
  CHECK(RandomStream(1, "data").bits(0) != RandomStream(1, "init").bits(0));
}

TEST_CASE("uniform numbers fill (0, 1) evenly, normal ones have normal moments", "[random]") {
  const RandomStream stream(42, "moments");
  const int n = 200000;
  std::vector<int> bins(20);
  double sum = 0, squares = 0, cubes = 0, fourths = 0, neighbours = 0, before = 0;
  int beyond_two = 0;
  for (uint64_t i = 0; i < static_cast<uint64_t>(n); ++i) {
    const double u = stream.uniform(i);
    if (!(u > 0 && u < 1)) FAIL("uniform " << u);
    ++bins[static_cast<size_t>(u * 20)];
    const double z = stream.normal(i);
    sum += z;
    squares += z * z;
    cubes += z * z * z;
    fourths += z * z * z * z;
    neighbours += z * before;
    before = z;
    beyond_two += std::abs(z) > 2;
  }
  double chi = 0;
  for (const int count : bins) chi += (count - n / 20.0) * (count - n / 20.0) / (n / 20.0);
  CHECK(chi < 43.8);  // 19 degrees of freedom, p = 0.001
  const double five_sigma = 5 / std::sqrt(n);
  CHECK(std::abs(sum / n) < five_sigma);
  CHECK(std::abs(squares / n - 1) < five_sigma * std::sqrt(2));
  CHECK(std::abs(cubes / n) < five_sigma * std::sqrt(15));
  CHECK(std::abs(fourths / n - 3) < five_sigma * std::sqrt(96));
  CHECK(std::abs(neighbours / n) < five_sigma);
  CHECK(std::abs(beyond_two / static_cast<double>(n) - 0.0455) < five_sigma * 0.21);
}

TEST_CASE("permute_index is a bijection of [0, n) for every n up to 4096", "[random]") {
  std::vector<char> seen;
  for (uint64_t n = 1; n <= 4096; ++n) {
    seen.assign(n, 0);
    for (uint64_t i = 0; i < n; ++i) {
      const uint64_t j = permute_index(i, n, 17 * n);
      if (j >= n || seen[j]) FAIL("n " << n << ": index " << i << " goes to " << j);
      seen[j] = 1;
    }
  }
  SUCCEED();
}

TEST_CASE("permute_index stays a bijection around powers of two", "[random]") {
  for (const uint64_t n : {65535u, 65536u, 65537u, 131072u, 131073u}) {
    std::vector<char> seen(n);
    for (uint64_t i = 0; i < n; ++i) seen[permute_index(i, n, 5)] = 1;
    CHECK(std::accumulate(seen.begin(), seen.end(), uint64_t{0}) == n);
  }
}

TEST_CASE("permute_index gives distinct positions in [0, n) for n beyond 32 bits", "[random]") {
  for (const uint64_t n :
       {uint64_t{1} << 33, (uint64_t{1} << 33) + 12345, (uint64_t{1} << 63) - 25, uint64_t{1} << 63}) {
    INFO(n);
    std::unordered_set<uint64_t> places;
    bool inside = true, upper_half = false;
    for (uint64_t i = 0; i < 20000; ++i)
      for (const uint64_t index : {i, n - 1 - i, n / 20000 * i + 20000}) {
        if (index >= n - 20000 && index != n - 1 - i) continue;
        const uint64_t place = permute_index(index, n, 99);
        inside = inside && place < n;
        upper_half = upper_half || place > n / 2;
        places.insert(place);
      }
    CHECK(inside);
    CHECK(upper_half);
    CHECK(places.size() >= 59998);
  }
}

TEST_CASE("permute_index distributes each index evenly, and independently of its neighbour", "[random]") {
  const int keys = 20000;
  for (const uint64_t n : {2u, 3u, 5u, 10u}) {
    INFO(n);
    std::vector<int> pairs(n * n);
    for (int key = 0; key < keys; ++key)
      ++pairs[permute_index(0, n, static_cast<uint64_t>(key)) * n +
              permute_index(1, n, static_cast<uint64_t>(key))];
    const double expected = keys / static_cast<double>(n * (n - 1));
    double chi = 0;
    for (uint64_t i = 0; i < n; ++i)
      for (uint64_t j = 0; j < n; ++j) {
        const int count = pairs[i * n + j];
        if (i == j)
          CHECK(count == 0);
        else
          chi += (count - expected) * (count - expected) / expected;
      }
    const double freedom = static_cast<double>(n * (n - 1) - 1);
    CHECK(chi < freedom + 5 * std::sqrt(2 * freedom) + 5);
  }
}

TEST_CASE("permute_index refuses an index outside its range", "[random]") {
  CHECK_THROWS_AS(permute_index(5, 5, 0), Error);
  CHECK_THROWS_AS(permute_index(0, 0, 0), Error);
  CHECK_THROWS_AS(permute_index(0, (uint64_t{1} << 63) + 1, 0), Error);
}
