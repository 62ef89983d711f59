#include "ops/fixed_sum.h"

#include <algorithm>

#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {

int64_t* fixed(const Tensor& t) { return static_cast<int64_t*>(t.data); }

}  // namespace

TEST_CASE("a fixed-point sum is exact to its last bit, in any order and on any number of threads",
          "[fixed_sum]") {
  const auto type = GENERATE(DType::f32, DType::f64);
  const int threads = GENERATE(1, 2);
  const Threads scope(threads);
  const int64_t n = 40000, rows = 5;
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor x = pool.normal(type, {rows, n}), back = pool.zeros(type, {n});
  const Tensor forward = pool.zeros(DType::i32, {n, 2}), backward = pool.zeros(DType::i32, {n, 2}),
               parts = pool.zeros(DType::i32, {rows, n, 2}), sum = pool.zeros(DType::i32, {n, 2}),
               bad = pool.zeros(DType::i32, {1, 2});
  fixed(bad)[0] = kNoneBad;
  std::fill_n(fixed(backward), n, int64_t{-1});  // overwritten
  for (int64_t r = 0; r < rows; ++r) {
    add_fixed(ctx, forward, bad, x.rows(r, 1).view({n}), 4, 0, Into::add);
    add_fixed(ctx, backward, bad, x.rows(rows - 1 - r, 1).view({n}), 8, 0,
              r == 0 ? Into::overwrite : Into::add);
    add_fixed(ctx, parts.rows(r, 1).view({n, 2}), bad, x.rows(r, 1).view({n}), 8, 0, Into::overwrite);
  }
  sum_fixed_rows(ctx, sum, parts);
  from_fixed(ctx, back, sum);
  CHECK(same_bits(backward, sum));
  double largest = 0;
  int64_t first_large = kNoneBad, differ = 0;
  for (int64_t i = 0; i < n; ++i) {
    double s = 0;
    bool all_fit = true;
    for (int64_t r = 0; r < rows; ++r) {
      const double v = Pool::get(x, r * n + i);
      s += v;
      if (std::abs(v) >= 4) first_large = std::min(first_large, i), all_fit = false;
    }
    if (all_fit && fixed(forward)[i] != fixed(sum)[i]) ++differ;
    largest = std::max(largest, std::abs(Pool::get(back, i) - s));
  }
  CHECK(differ == 0);
  CHECK(largest < (type == DType::f64 ? 1e-14 : 2e-6));  // half of the last bit of a sum of up to 16
  REQUIRE(first_large != kNoneBad);  // five rows of 40,000 normal numbers have some beyond 4
  CHECK(fixed(bad)[0] == first_large);
}

TEST_CASE("fixed-point numbers round to nearest, ties to even, and skip values not below the limit",
          "[fixed_sum]") {
  Pool pool;
  Context ctx(kTestScratch);
  const double bit = 1 / kFixedOne;
  const std::vector<std::pair<double, int64_t>> numbers = {{bit, 1},
                                                           {1.5 * bit, 2},
                                                           {2.5 * bit, 2},
                                                           {-1.5 * bit, -2},
                                                           {0.49 * bit, 0},
                                                           {1, int64_t{1} << 50},
                                                           {-2048, -(int64_t{1} << 61)},
                                                           {4096, 0},
                                                           {-4096, 0},
                                                           {NAN, 0},
                                                           {INFINITY, 0}};
  const auto n = static_cast<int64_t>(numbers.size());
  const Tensor x = pool.zeros(DType::f64, {n}), sums = pool.zeros(DType::i32, {n, 2}),
               bad = pool.zeros(DType::i32, {1, 2});
  for (int64_t i = 0; i < n; ++i) Pool::set(x, i, numbers[static_cast<size_t>(i)].first);
  fixed(bad)[0] = 107;
  add_fixed(ctx, sums, bad, x, kFixedLimit, 100, Into::add);
  for (int64_t i = 0; i < n; ++i) {
    INFO(numbers[static_cast<size_t>(i)].first);
    CHECK(fixed(sums)[i] == numbers[static_cast<size_t>(i)].second);
  }
  CHECK(fixed(bad)[0] == 107);  // element 7 is the first one
  fixed(bad)[0] = kNoneBad;
  add_fixed(ctx, sums, bad, x, 1000, 100, Into::overwrite);
  CHECK(fixed(bad)[0] == 106);
  CHECK_THROWS_WITH(add_fixed(ctx, sums, bad, x, 5000, 0, Into::add), Catch::Contains("limit 5000"));
}
