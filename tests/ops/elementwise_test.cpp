#include "ops/elementwise.h"

#include "ops/columns.h"
#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

TEST_CASE("add, clip, scale and fill agree over types and threads, at odd sizes", "[elementwise]") {
  for (const int64_t n : {1, 31, 4099, 70001}) {
    INFO(n);
    check_op([&](Pool& pool, Context& ctx, DType type) {
      const Tensor a = exact_normal(pool, type, {n}), b = exact_normal(pool, type, {n}),
                   sum = pool.zeros(type, {n});
      const Tensor clipped = pool.zeros(type, {n}), dx = pool.zeros(type, {n}), scaled = pool.copy(b, type);
      const Tensor filled = pool.zeros(type, {n});
      add_forward(ctx, sum, a, b);
      clip_forward(ctx, clipped, a, 0.75);
      clip_backward(ctx, dx, b, a, 0.75);
      scale(ctx, scaled, 0.3);
      fill(ctx, filled, 0.3);
      return std::vector{sum, clipped, dx, scaled, filled};
    });
  }
}

TEST_CASE("add, clip and scale equal their formulas", "[elementwise]") {
  Pool pool;
  Context ctx(kTestScratch);
  const int64_t n = 100;
  const Tensor a = pool.normal(DType::f64, {n}), b = pool.normal(DType::f64, {n}),
               y = pool.zeros(DType::f64, {n});
  add_forward(ctx, y, a, b);
  for (int64_t i = 0; i < n; ++i) CHECK(Pool::get(y, i) == Pool::get(a, i) + Pool::get(b, i));
  clip_forward(ctx, y, a, 0.5);
  for (int64_t i = 0; i < n; ++i) CHECK(Pool::get(y, i) == std::clamp(Pool::get(a, i), -0.5, 0.5));
  const Tensor c = pool.copy(a, DType::f64);
  scale(ctx, c, -2.5);
  for (int64_t i = 0; i < n; ++i) CHECK(Pool::get(c, i) == -2.5 * Pool::get(a, i));
  fill(ctx, c, 1.25);
  for (int64_t i = 0; i < n; ++i) CHECK(Pool::get(c, i) == 1.25);
}

TEST_CASE("columns are extracted, written and added at their position, over types and threads",
          "[elementwise]") {
  check_op([](Pool& pool, Context& ctx, DType type) {
    const Tensor x = exact_normal(pool, type, {300, 90}), part = pool.zeros(type, {300, 70}),
                 y = pool.zeros(type, {300, 90});
    take_columns(ctx, part, x, 13);
    add_columns(ctx, y, part, 20);
    for (int64_t i = 0; !ctx.dry_run && i < y.numel(); ++i) {
      const bool inside = i % 90 >= 20;
      REQUIRE(Pool::get(y, i) == (inside ? Pool::get(x, i - 7) : 0));
    }
    put_columns(ctx, y, part, 0);
    for (int64_t i = 0; !ctx.dry_run && i < y.numel(); ++i)
      REQUIRE(Pool::get(y, i) == Pool::get(x, i % 90 < 70 ? i + 13 : i - 7));
    return std::vector{part, y};
  });
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor wide = pool.zeros(DType::f32, {2, 4}), narrow = pool.zeros(DType::f32, {2, 3});
  CHECK(error_of([&] { add_columns(ctx, wide, narrow, 2); }) ==
        "add_columns: (2, 3) f32 from column 2 on is no part of (2, 4) f32");
  // A view of columns is taken by the ops that say so alone.
  const Tensor columns = wide.columns(1, 3);
  CHECK(columns.data == wide.as<float>() + 1);
  CHECK(columns.rows(1, 1).data == wide.as<float>() + 5);
  CHECK(wide.columns(0, 4).contiguous());
  CHECK(error_of([&] {
          add_forward(ctx, narrow, columns, narrow);
        }).find("contiguous, got (2, 3) f32 with rows 4 elements apart") != std::string::npos);
  CHECK_THROWS(columns.as<float>());
  CHECK_THROWS(columns.view({3, 2}));
}

TEST_CASE("the gradient of clip passes below the limit, and is zero at and beyond it", "[elementwise]") {
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes) {
    INFO(dtype_name(type));
    Pool pool;
    const double values[] = {-300.0, -2.0, -1.984375, 0.0, 1.984375, 2.0, 2.015625, 300.0};
    const double expected[] = {0, 0, 3, 3, 3, 0, 0, 0};
    const Tensor x = pool.zeros(type, {8}), dy = pool.zeros(type, {8}), dx = pool.zeros(type, {8});
    for (int64_t i = 0; i < 8; ++i) Pool::set(x, i, values[i]), Pool::set(dy, i, 3);
    clip_backward(ctx, dx, dy, x, 2.0);
    for (int64_t i = 0; i < 8; ++i) CHECK(Pool::get(dx, i) == expected[i]);
  }
}

TEST_CASE("the gradient of clip equals central differences away from the limit", "[elementwise]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor x = pool.normal(DType::f64, {200}), dy = pool.normal(DType::f64, {200});
  const Tensor y = pool.zeros(DType::f64, {200}), dx = pool.zeros(DType::f64, {200});
  for (int64_t i = 0; i < 200; ++i)
    if (std::abs(std::abs(Pool::get(x, i)) - 0.75) < 0.01) Pool::set(x, i, 0);
  clip_backward(ctx, dx, dy, x, 0.75);
  CHECK(gradient_error(x, dx, [&] { return clip_forward(ctx, y, x, 0.75), dot(dy, y); }) <=
        kGradientTolerance);
}

TEST_CASE("clip keeps NaN and bounds infinities", "[elementwise]") {
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes) {
    Pool pool;
    const Tensor x = pool.zeros(type, {3});
    Pool::set(x, 0, NAN), Pool::set(x, 1, INFINITY), Pool::set(x, 2, -INFINITY);
    clip_forward(ctx, x, x, 100);
    CHECK(std::isnan(Pool::get(x, 0)));
    CHECK(Pool::get(x, 1) == 100);
    CHECK(Pool::get(x, 2) == -100);
  }
}

TEST_CASE("element-wise ops work in place", "[elementwise]") {
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes) {
    INFO(dtype_name(type));
    Pool pool;
    const int64_t n = 999;
    const Tensor a = pool.normal(type, {n}), b = pool.normal(type, {n}), sum = pool.zeros(type, {n});
    const Tensor clipped = pool.zeros(type, {n}), dx = pool.zeros(type, {n});
    add_forward(ctx, sum, a, b);
    clip_forward(ctx, clipped, a, 0.5);
    clip_backward(ctx, dx, b, a, 0.5);
    const Tensor a1 = pool.copy(a, type), b1 = pool.copy(b, type), a2 = pool.copy(a, type),
                 b2 = pool.copy(b, type);
    add_forward(ctx, a1, a1, b);
    add_forward(ctx, b1, a, b1);
    clip_forward(ctx, a2, a2, 0.5);
    clip_backward(ctx, b2, b2, a, 0.5);
    CHECK(same_bits(a1, sum));
    CHECK(same_bits(b1, sum));
    CHECK(same_bits(a2, clipped));
    CHECK(same_bits(b2, dx));
  }
}

TEST_CASE("cast rounds to nearest even between every pair of types", "[elementwise]") {
  Pool pool;
  Context ctx(kTestScratch);
  const int64_t n = 40001;
  for (const DType from : kFloatingTypes)
    for (const DType to : kFloatingTypes) {
      INFO(dtype_name(from) << " to " << dtype_name(to));
      const Tensor x = pool.normal(from, {n}), y = pool.zeros(to, {n}), back = pool.zeros(from, {n});
      cast(ctx, y, x);
      if (to != DType::bf16 || from == DType::f32)
        for (int64_t i = 0; i < n; ++i) {
          Tensor one = pool.zeros(to, {1});
          if (i % 97) continue;
          Pool::set(one, 0, Pool::get(x, i));
          CHECK(Pool::get(y, i) == Pool::get(one, 0));
        }
      // Half a unit in the last place of the narrower type.
      const double half = to == DType::bf16 ? 0x1p-8 : to == DType::f32 ? 0x1p-24 : 0;
      bool close = true;
      for (int64_t i = 0; i < n; ++i)
        close = close &&
                std::abs(Pool::get(y, i) - Pool::get(x, i)) <= half * std::abs(Pool::get(x, i)) * 1.000001;
      CHECK(close);
      cast(ctx, back, y);
      if (dtype_size(to) >= dtype_size(from)) CHECK(same_bits(back, x));
    }
}

TEST_CASE("cast from f64 to bf16 rounds once", "[elementwise]") {
  // 1 + 2^-8 is the tie between the bf16 neighbours 1 and 1 + 2^-7; f32 cannot tell these three apart from
  // it.
  Pool pool;
  Context ctx(kTestScratch);
  const double inputs[] = {1 + 0x1p-8,
                           1 + 0x1p-8 + 0x1p-40,
                           1 + 0x1p-8 - 0x1p-40,
                           -1 - 0x1p-8 - 0x1p-40,
                           1 + 3 * 0x1p-8,
                           1 + 3 * 0x1p-8 - 0x1p-40,
                           1e300,
                           -1e300,
                           NAN,
                           0.0,
                           INFINITY,
                           3.3961775292304957e38};
  const double expected[] = {1,        1 + 0x1p-7, 1,   -1 - 0x1p-7, 1 + 0x1p-6, 1 + 0x1p-7,
                             INFINITY, -INFINITY,  NAN, 0,           INFINITY,   INFINITY};
  const Tensor x = pool.zeros(DType::f64, {12}), y = pool.zeros(DType::bf16, {12});
  for (int64_t i = 0; i < 12; ++i) Pool::set(x, i, inputs[i]);
  cast(ctx, y, x);
  for (int64_t i = 0; i < 12; ++i) {
    INFO(inputs[i]);
    if (std::isnan(expected[i]))
      CHECK(std::isnan(Pool::get(y, i)));
    else
      CHECK(Pool::get(y, i) == expected[i]);
  }
  fill(ctx, y, 1 + 0x1p-8 + 0x1p-40);
  CHECK(Pool::get(y, 0) == 1 + 0x1p-7);
}

TEST_CASE("element-wise ops refuse wrong arguments by name", "[elementwise]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor x = pool.zeros(DType::f32, {4, 6}), other = pool.zeros(DType::f32, {6, 4});
  const Tensor half = pool.zeros(DType::bf16, {4, 6}), tokens = pool.zeros(DType::i32, {4, 6});
  CHECK(error_of([&] { add_forward(ctx, x, x, other); }) ==
        "add_forward: b must be (4, 6) f32, got (6, 4) f32");
  CHECK(error_of([&] { add_forward(ctx, half, x, x); }) ==
        "add_forward: y must be (4, 6) f32, got (4, 6) bf16");
  CHECK(error_of([&] { clip_forward(ctx, x, x, 0); }) == "clip_forward: limit must be above 0, got 0");
  CHECK(error_of([&] { clip_backward(ctx, x, x, other, 1); }) ==
        "clip_backward: dy must be (6, 4) f32, got (4, 6) f32");
  CHECK(error_of([&] { cast(ctx, other, x); }) ==
        "cast: y must have the shape of x, (4, 6) f32, got (6, 4) f32");
  CHECK(error_of([&] { cast(ctx, tokens, x); }) == "cast: y must be f32, bf16 or f64, got (4, 6) i32");
  CHECK(error_of([&] { fill(ctx, tokens, 0); }) == "fill: y must be f32, bf16 or f64, got (4, 6) i32");
  CHECK(error_of([&] { scale(ctx, Tensor(), 1); }) == "scale: y must be f32, bf16 or f64, got () f32");
}
