#include "ops/bit_sum.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "core/parallel_for.h"
#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {

uint64_t sum_of(const Tensor& x, int64_t first = 0, uint64_t seed = 5) {
  Context ctx(64);
  int32_t sum[2];
  bit_sum(ctx, Tensor(sum, DType::i32, {2}), x, first, seed);
  uint64_t result;
  std::memcpy(&result, sum, sizeof result);
  return result;
}

}  // namespace

TEST_CASE("a bit sum depends on every bit, and not on parts or threads", "[bit_sum]") {
  const int64_t n = 3 * 16384 + 77;
  for (const DType type : kFloatingTypes) {
    Pool pool;
    const Tensor x = pool.normal(type, {n});
    const uint64_t whole = sum_of(x);
    CHECK(sum_of(x.rows(0, 1001)) + sum_of(x.rows(1001, n - 1001), 1001) == whole);
    CHECK(sum_of(x, 1) != whole);
    CHECK(sum_of(x, 0, 6) != whole);
    const int threads = num_threads();
    for (const int other : {1, 3}) {
      set_num_threads(other);
      CHECK(sum_of(x) == whole);
    }
    set_num_threads(threads);
    auto* bytes = static_cast<unsigned char*>(x.data);
    for (int64_t at = 0; at < 8 * x.bytes(); at += 9973) {
      bytes[at / 8] = static_cast<unsigned char>(bytes[at / 8] ^ (1 << at % 8));
      CHECK(sum_of(x) != whole);
      bytes[at / 8] = static_cast<unsigned char>(bytes[at / 8] ^ (1 << at % 8));
    }
    CHECK(sum_of(x) == whole);
  }
}

TEST_CASE("a word sum depends on every bit, adds to what is there, and not on threads", "[bit_sum]") {
  const int64_t n = 2 * 16384 + 77;
  Context ctx(64);
  const auto sum_of_words = [&](const Tensor& x, int32_t before = 0) {
    word_sum(ctx, Tensor(&before, DType::i32, {1}), x);
    return static_cast<uint32_t>(before);
  };
  for (const DType type : kFloatingTypes) {
    INFO(dtype_name(type));
    Pool pool;
    const Tensor x = pool.normal(type, {n});
    const uint32_t whole = sum_of_words(x);
    CHECK(sum_of_words(x.rows(0, 1001)) + sum_of_words(x.rows(1001, n - 1001)) == whole);
    CHECK(sum_of_words(x, -5) == whole - 5);
    const int threads = num_threads();
    set_num_threads(3);
    CHECK(sum_of_words(x) == whole);
    set_num_threads(threads);
    auto* bytes = static_cast<unsigned char*>(x.data);
    for (int64_t at = 0; at < 8 * x.bytes(); at += 9973) {
      bytes[at / 8] = static_cast<unsigned char>(bytes[at / 8] ^ (1 << at % 8));
      CHECK(sum_of_words(x) != whole);
      bytes[at / 8] = static_cast<unsigned char>(bytes[at / 8] ^ (1 << at % 8));
    }
  }
}
