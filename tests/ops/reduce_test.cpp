#include "ops/reduce.h"

#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {
constexpr int64_t kChunk = 65536;
}

TEST_CASE("reductions equal their formulas, over types and threads, across chunks", "[reduce]") {
  for (const int64_t n : {int64_t{1}, int64_t{77}, kChunk, 3 * kChunk + 17, 9 * kChunk + 17}) {
    INFO(n);
    check_op([&](Pool& pool, Context& ctx, DType type) {
      const Tensor x = exact_normal(pool, type, {n}), results = pool.zeros(DType::f64, {3});
      double* r = results.as<double>();
      sum(ctx, scalar(r[0]), x, Into::overwrite);
      sum_of_squares(ctx, scalar(r[1]), x);
      max_abs(ctx, scalar(r[2]), x);
      if (ctx.dry_run) return std::vector{results};
      double s = 0, squares = 0, largest = 0, magnitudes = 0;
      for (int64_t i = 0; i < n; ++i) {
        const double v = Pool::get(x, i);
        s += v;
        squares += v * v;
        largest = std::max(largest, std::abs(v));
        magnitudes += std::abs(v);
      }
      CHECK(std::abs(r[0] - s) <= 1e-12 * magnitudes);
      CHECK(std::abs(r[1] - squares) <= 1e-12 * squares);
      CHECK(r[2] == largest);
      return std::vector{results};
    });
  }
}

TEST_CASE("a chunk's squares have the same sum alone as beside others", "[reduce]") {
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes) {
    INFO(dtype_name(type));
    Pool pool;
    const int64_t chunks = 10;
    const Tensor x = pool.normal(type, {chunks * kChunk});
    double whole, in_order = 0;
    sum_of_squares(ctx, scalar(whole), x);
    for (int64_t k = 0; k < chunks; ++k) {
      double one;
      sum_of_squares(ctx, scalar(one), x.rows(k * kChunk, kChunk));
      in_order += one;
    }
    CHECK(whole == in_order);
  }
}

TEST_CASE("a NaN or an infinity at any position affects every reduction", "[reduce]") {
  Context ctx(kTestScratch);
  const int64_t n = 2 * kChunk + 5;
  for (const DType type : kFloatingTypes) {
    Pool pool;
    const Tensor x = pool.normal(type, {n});
    for (const int64_t at : {int64_t{0}, int64_t{12345}, kChunk, n - 1}) {
      INFO(dtype_name(type) << " at " << at);
      double s, squares, largest;
      const auto run = [&](double value) {
        const double before = Pool::get(x, at);
        Pool::set(x, at, value);
        sum(ctx, scalar(s), x, Into::overwrite);
        sum_of_squares(ctx, scalar(squares), x);
        max_abs(ctx, scalar(largest), x);
        Pool::set(x, at, before);
      };
      for (const double nan : {NAN, -NAN}) {
        run(nan);
        CHECK(std::isnan(s));
        CHECK(std::isnan(squares));
        CHECK(std::isnan(largest));
      }
      for (const double inf : {INFINITY, -INFINITY}) {
        run(inf);
        CHECK(s == inf);
        CHECK(squares == INFINITY);
        CHECK(largest == INFINITY);
      }
      run(-100);
      CHECK(largest == 100);
    }
  }
}

TEST_CASE("sums are in double: a small number is not lost beside a large one", "[reduce]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor x = pool.zeros(DType::f32, {100000});
  for (int64_t i = 0; i < x.numel(); ++i) Pool::set(x, i, 1e-4);
  Pool::set(x, 0, 1e8);
  double s;
  sum(ctx, scalar(s), x, Into::overwrite);
  CHECK(s == Approx(1e8 + 99999 * static_cast<double>(1e-4f)).epsilon(1e-12));
}

TEST_CASE("a sum accumulates with Into::add", "[reduce]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor x = pool.normal(DType::f32, {1000});
  double whole, twice = 2.5;
  sum(ctx, scalar(whole), x, Into::overwrite);
  sum(ctx, scalar(twice), x, Into::add);
  CHECK(twice == 2.5 + whole);
}

TEST_CASE("a square beyond the range of float is finite in a sum of squares", "[reduce]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor x = pool.zeros(DType::f32, {3});
  Pool::set(x, 1, 1e30);
  double s;
  sum_of_squares(ctx, scalar(s), x);
  CHECK(s == Approx(1e60));
}

TEST_CASE("reductions of empty tensors are zero, and wrong types are refused by name", "[reduce]") {
  Pool pool;
  Context ctx(kTestScratch);
  double s = 5;
  sum(ctx, scalar(s), pool.zeros(DType::f32, {0}), Into::overwrite);
  CHECK(s == 0);
  s = 5;
  max_abs(ctx, scalar(s), pool.zeros(DType::bf16, {0}));
  CHECK(s == 0);
  const Tensor tokens = pool.zeros(DType::i32, {4});
  CHECK(error_of([&] { sum(ctx, scalar(s), tokens, Into::overwrite); }) ==
        "sum: x must be f32, bf16 or f64, got (4) i32");
  CHECK(error_of([&] { sum_of_squares(ctx, scalar(s), tokens); }) ==
        "sum_of_squares: x must be f32, bf16 or f64, got (4) i32");
  CHECK(error_of([&] { max_abs(ctx, scalar(s), tokens); }) ==
        "max_abs: x must be f32, bf16 or f64, got (4) i32");
}

TEST_CASE("binned squares are order-independent: any partition into blocks of 32 gives the same bits",
          "[reduce]") {
  Context ctx(kTestScratch);
  const int64_t n = 40 * 1000 + 17;
  for (const DType type : kFloatingTypes) {
    Pool pool;
    const Tensor x = pool.normal(type, {n}), bins = pool.zeros(DType::f64, {2, kSquareBins});
    // Over sixty binary orders of magnitude, so that an ordinary sum would depend on its order.
    for (int64_t i = 0; i < n; ++i)
      Pool::set(x, i, std::ldexp(Pool::get(x, i), static_cast<int>(i / 32 % 60) - 40));
    const Tensor whole = bins.rows(0, 1).view({kSquareBins}), cut = bins.rows(1, 1).view({kSquareBins});
    add_squares(ctx, whole, x);
    std::vector<std::pair<int64_t, int64_t>> parts;
    for (int64_t begin = 0, size = 32; begin < n; begin += size, size = size % 4096 + 96)
      parts.emplace_back(begin, std::min(size, n - begin));
    std::reverse(parts.begin(), parts.end());
    double plain = 0, reversed = 0;
    for (const auto& [begin, count] : parts) add_squares(ctx, cut, x.rows(begin, count));
    for (int64_t i = 0; i < n; ++i) {
      plain += Pool::get(x, i) * Pool::get(x, i);
      reversed += Pool::get(x, n - 1 - i) * Pool::get(x, n - 1 - i);
    }
    CHECK(plain != reversed);  // or nothing is shown
    const double a = squares_of_bins(whole.as<double>()), b = squares_of_bins(cut.as<double>());
    CHECK(a == b);
    for (int64_t k = 0; k < kSquareBins; ++k) CHECK(whole.as<double>()[k] == cut.as<double>()[k]);
    CHECK(a == Approx(plain).epsilon(1e-12));
    Pool::set(x, 5000, INFINITY);
    add_squares(ctx, cut, x);
    CHECK(!std::isfinite(squares_of_bins(cut.as<double>())));
  }
}
