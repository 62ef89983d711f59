#include "ops/activation.h"

#include <array>

#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {
constexpr int64_t kSizes[][2] = {{1, 1}, {3, 17}, {5, 64}, {301, 131}};
}

TEST_CASE("silu and swiglu agree over types and threads, at odd sizes", "[activation]") {
  for (const auto& [rows, width] : kSizes) {
    INFO(rows << " x " << width);
    const int64_t T = rows, F = width;
    check_op([&](Pool& pool, Context& ctx, DType type) {
      const Tensor x = exact_normal(pool, type, {T, F}, 3), dy = exact_normal(pool, type, {T, F});
      const Tensor gate_up = exact_normal(pool, type, {T, 2 * F}, 3);
      const Tensor y = pool.zeros(type, {T, F}), dx = pool.zeros(type, {T, F});
      const Tensor z = pool.zeros(type, {T, F}), dgate_up = pool.zeros(type, {T, 2 * F});
      silu_forward(ctx, y, x);
      silu_backward(ctx, dx, dy, x);
      swiglu_forward(ctx, z, gate_up);
      swiglu_backward(ctx, dgate_up, dy, gate_up);
      const Tensor squared = pool.zeros(type, {T, F}), dsquared = pool.copy(dy, type);
      squared_relu_forward(ctx, squared, x);
      squared_relu_backward(ctx, dsquared, dsquared, x);  // in place
      return std::vector{y, dx, z, dgate_up, squared, dsquared};
    });
  }
}

TEST_CASE("silu and swiglu equal their formulas", "[activation]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor gate_up = pool.normal(DType::f64, {4, 10}), y = pool.zeros(DType::f64, {4, 5});
  const Tensor s = pool.zeros(DType::f64, {4, 10});
  silu_forward(ctx, s, gate_up);
  swiglu_forward(ctx, y, gate_up);
  for (int64_t t = 0; t < 4; ++t)
    for (int64_t i = 0; i < 5; ++i) {
      const double g = Pool::get(gate_up, t * 10 + i), up = Pool::get(gate_up, t * 10 + 5 + i);
      CHECK(Pool::get(s, t * 10 + i) == Approx(g / (1 + std::exp(-g))).epsilon(1e-14));
      CHECK(Pool::get(y, t * 5 + i) == Approx(up * g / (1 + std::exp(-g))).epsilon(1e-14));
    }
}

TEST_CASE("silu and swiglu gradients equal central differences", "[activation]") {
  Pool pool;
  Context ctx(kTestScratch);
  const int64_t T = 7, F = 9;
  const Tensor x = pool.normal(DType::f64, {T, F}), gate_up = pool.normal(DType::f64, {T, 2 * F});
  const Tensor y = pool.zeros(DType::f64, {T, F}), dy = pool.normal(DType::f64, {T, F});
  const Tensor dx = pool.normal(DType::f64, {T, F}), dgate_up = pool.normal(DType::f64, {T, 2 * F});
  silu_backward(ctx, dx, dy, x);
  CHECK(gradient_error(x, dx, [&] { return silu_forward(ctx, y, x), dot(dy, y); }) <= kGradientTolerance);
  squared_relu_backward(ctx, dx, dy, x);
  const auto squared = [&] { return squared_relu_forward(ctx, y, x), dot(dy, y); };
  CHECK(gradient_error(x, dx, squared, 200, 1e-6) <= kGradientTolerance);  // its second derivative jumps at 0
  Pool::set(x, 0, -2), Pool::set(x, 1, 3), Pool::set(x, 2, NAN);
  squared();
  CHECK(Pool::get(y, 0) == 0);
  CHECK(Pool::get(y, 1) == 9);
  CHECK(std::isnan(Pool::get(y, 2)));
  swiglu_backward(ctx, dgate_up, dy, gate_up);
  CHECK(gradient_error(gate_up, dgate_up, [&] { return swiglu_forward(ctx, y, gate_up), dot(dy, y); }) <=
        kGradientTolerance);
}

TEST_CASE("silu and swiglu work in place", "[activation]") {
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes) {
    INFO(dtype_name(type));
    Pool pool;
    const int64_t T = 5, F = 37;
    const Tensor x = pool.normal(type, {T, F}), dy = pool.normal(type, {T, F}),
                 gate_up = pool.normal(type, {T, 2 * F});
    const Tensor y = pool.zeros(type, {T, F}), dx = pool.zeros(type, {T, F}),
                 dgate_up = pool.zeros(type, {T, 2 * F});
    silu_forward(ctx, y, x);
    silu_backward(ctx, dx, dy, x);
    swiglu_backward(ctx, dgate_up, dy, gate_up);
    const Tensor x2 = pool.copy(x, type), dy2 = pool.copy(dy, type), gate_up2 = pool.copy(gate_up, type);
    silu_forward(ctx, x2, x2);
    silu_backward(ctx, dy2, dy2, x);
    swiglu_backward(ctx, gate_up2, dy, gate_up2);
    CHECK(same_bits(x2, y));
    CHECK(same_bits(dy2, dx));
    CHECK(same_bits(gate_up2, dgate_up));
  }
}

TEST_CASE("silu gives an element the same bits for any partition of the work", "[activation]") {
  // Alone, an element is computed by the scalar remainder of the loop, among others by its vector body.
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes) {
    INFO(dtype_name(type));
    Pool pool;
    const int64_t n = 2000;
    const Tensor x = pool.normal(type, {n}, 3), dy = pool.normal(type, {n});
    const Tensor y = pool.zeros(type, {n}), dx = pool.zeros(type, {n});
    const Tensor y1 = pool.zeros(type, {n}), dx1 = pool.zeros(type, {n});
    silu_forward(ctx, y, x);
    silu_backward(ctx, dx, dy, x);
    for (int64_t i = 0; i < n; ++i) {
      silu_forward(ctx, y1.rows(i, 1), x.rows(i, 1));
      silu_backward(ctx, dx1.rows(i, 1), dy.rows(i, 1), x.rows(i, 1));
    }
    CHECK(same_bits(y, y1));
    CHECK(same_bits(dx, dx1));
  }
}

TEST_CASE("silu saturates without overflow and keeps NaN", "[activation]") {
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes) {
    INFO(dtype_name(type));
    Pool pool;
    const Tensor x = pool.zeros(type, {5}), y = pool.zeros(type, {5}), dy = pool.zeros(type, {5});
    const double values[] = {-1000, -100, 100, 1000, NAN};
    for (int64_t i = 0; i < 5; ++i) Pool::set(x, i, values[i]), Pool::set(dy, i, 1);
    silu_forward(ctx, y, x);
    CHECK(std::abs(Pool::get(y, 0)) < 1e-30);
    CHECK(std::abs(Pool::get(y, 1)) < 1e-30);
    CHECK(Pool::get(y, 2) == 100);
    CHECK(Pool::get(y, 3) == 1000);
    CHECK(std::isnan(Pool::get(y, 4)));
    silu_backward(ctx, y, dy, x);
    CHECK(std::abs(Pool::get(y, 0)) < 1e-30);
    CHECK(Pool::get(y, 3) == 1);
    CHECK(std::isnan(Pool::get(y, 4)));
  }
}

TEST_CASE("silu and swiglu refuse wrong arguments by name", "[activation]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor x = pool.zeros(DType::f32, {4, 6}), half = pool.zeros(DType::f32, {4, 3});
  CHECK(error_of([&] { silu_forward(ctx, half, x); }) ==
        "silu_forward: y must be (4, 6) f32, got (4, 3) f32");
  CHECK(error_of([&] { silu_backward(ctx, x, half, x); }) ==
        "silu_backward: dy must be (4, 6) f32, got (4, 3) f32");
  CHECK(error_of([&] { swiglu_forward(ctx, x, x); }) ==
        "swiglu_forward: y must be (4, 3) f32, got (4, 6) f32");
  CHECK(error_of([&] { swiglu_forward(ctx, half, half); }) ==
        "swiglu_forward: gate_up must be (T, 2F), got (4, 3) f32");
  CHECK(error_of([&] { swiglu_backward(ctx, half, half, x); }) ==
        "swiglu_backward: dgate_up must be (4, 6) f32, got (4, 3) f32");
  const Tensor tokens = pool.zeros(DType::i32, {4, 6});
  CHECK(error_of([&] { silu_forward(ctx, tokens, tokens); }) ==
        "silu_forward: x must be f32, bf16 or f64, got (4, 6) i32");
}

namespace {

/// A permutation of n slots.
Tensor slots_of(Pool& pool, int64_t n) {
  const Tensor t = pool.zeros(DType::i32, {n});
  for (int64_t i = 0; i < n; ++i) t.as<int32_t>()[i] = static_cast<int32_t>((i * 7 + 3) % n);
  return t;
}

}  // namespace

TEST_CASE("weighted swiglu agrees over types and threads, at odd sizes", "[activation]") {
  for (const auto& size : {std::array<int64_t, 2>{1, 1}, {3, 17}, {5, 64}, {300, 131}}) {
    const int64_t R = size[0], F = size[1];
    INFO(R << " x " << F);
    check_op([&](Pool& pool, Context& ctx, DType type) {
      const Tensor gate_up = exact_normal(pool, type, {R, 2 * F}, 3), dy = exact_normal(pool, type, {R, F});
      const Tensor weights = exact_normal(pool, accumulate_dtype(type), {R, 1}), slots = slots_of(pool, R);
      const Tensor y = pool.zeros(type, {R, F}), dgate_up = pool.zeros(type, {R, 2 * F});
      const Tensor dweights = pool.zeros(accumulate_dtype(type), {R, 1});
      weighted_swiglu_forward(ctx, y, gate_up, weights, slots, {});
      weighted_swiglu_backward(ctx, dgate_up, dweights, dy, gate_up, weights, slots, {});
      const Tensor clamped = pool.zeros(type, {R, F}), dclamped = pool.copy(gate_up, type);
      const Tensor dclamped_weights = pool.zeros(accumulate_dtype(type), {R, 1});
      weighted_swiglu_forward(ctx, clamped, gate_up, weights, slots, 2.5);
      weighted_swiglu_backward(ctx, dclamped, dclamped_weights, dy, dclamped, weights, slots,
                               2.5);  // in place
      return std::vector{y, dgate_up, dweights, clamped, dclamped, dclamped_weights};
    });
  }
}

TEST_CASE("weighted swiglu equals swiglu times the weight of the row's slot, with its gradients",
          "[activation]") {
  Pool pool;
  Context ctx(kTestScratch);
  const int64_t T = 4, K = 2, R = T * K, F = 5;
  const Tensor gate_up = pool.normal(DType::f64, {R, 2 * F}), weights = pool.normal(DType::f64, {T, K});
  const Tensor slots = slots_of(pool, R), y = pool.zeros(DType::f64, {R, F}),
               plain = pool.zeros(DType::f64, {R, F});
  weighted_swiglu_forward(ctx, y, gate_up, weights, slots, {});
  swiglu_forward(ctx, plain, gate_up);
  for (int64_t i = 0; i < R * F; ++i)
    CHECK(Pool::get(y, i) ==
          Approx(Pool::get(weights, slots.as<int32_t>()[i / F]) * Pool::get(plain, i)).epsilon(1e-14));

  const Tensor dy = pool.normal(DType::f64, {R, F}), dgate_up = pool.zeros(DType::f64, {R, 2 * F});
  const Tensor dweights = pool.normal(DType::f64, {T, K});
  const auto loss = [&] { return weighted_swiglu_forward(ctx, y, gate_up, weights, slots, {}), dot(dy, y); };
  weighted_swiglu_backward(ctx, dgate_up, dweights, dy, gate_up, weights, slots, {});
  CHECK(gradient_error(gate_up, dgate_up, loss) <= kGradientTolerance);
  CHECK(gradient_error(weights, dweights, loss) <= kGradientTolerance);
}

TEST_CASE("with a limit it is gpt-oss's clamped form, with its gradients", "[activation]") {
  Pool pool;
  Context ctx(kTestScratch);
  const int64_t R = 60, F = 9;
  const double limit = 0.8;
  const Tensor gate_up = pool.normal(DType::f64, {R, 2 * F}), weights = pool.normal(DType::f64, {R});
  const Tensor slots = slots_of(pool, R), y = pool.zeros(DType::f64, {R, F});
  const auto forward = [&] { weighted_swiglu_forward(ctx, y, gate_up, weights, slots, limit); };
  forward();
  int64_t held = 0;
  for (int64_t i = 0; i < R * F; ++i) {
    const int64_t r = i / F, at = r * 2 * F + i % F;
    const double g = std::min(Pool::get(gate_up, at), limit),
                 u = std::clamp(Pool::get(gate_up, at + F), -limit, limit);
    held += g == limit || std::abs(u) == limit;
    CHECK(Pool::get(y, i) ==
          Approx(Pool::get(weights, slots.as<int32_t>()[r]) * g / (1 + std::exp(-1.702 * g)) * (u + 1))
              .epsilon(1e-13));
  }
  CHECK(held > R * F / 4);
  CHECK(held < R * F * 3 / 4);

  const Tensor dy = pool.normal(DType::f64, {R, F}), dgate_up = pool.zeros(DType::f64, {R, 2 * F});
  const Tensor dweights = pool.normal(DType::f64, {R});
  const auto loss = [&] { return forward(), dot(dy, y); };
  weighted_swiglu_backward(ctx, dgate_up, dweights, dy, gate_up, weights, slots, limit);
  CHECK(gradient_error(gate_up, dgate_up, loss, 2000, 1e-6) <= kGradientTolerance);  // it has kinks
  CHECK(gradient_error(weights, dweights, loss) <= kGradientTolerance);

  Pool::set(gate_up, 0, NAN), Pool::set(gate_up, 1, 1e300), Pool::set(gate_up, F + 1, -1e300);
  forward();
  CHECK(std::isnan(Pool::get(y, 0)));
  CHECK(Pool::get(y, 1) == Approx(Pool::get(weights, slots.as<int32_t>()[0]) * limit /
                                  (1 + std::exp(-1.702 * limit)) * (1 - limit)));
  CHECK_THAT(error_of([&] { weighted_swiglu_forward(ctx, y, gate_up, weights, slots, 0.0); }),
             Catch::Contains("weighted_swiglu_forward: limit must be above 0"));
}

TEST_CASE("weighted swiglu refuses wrong shapes by name", "[activation]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor y = pool.zeros(DType::f32, {4, 5}), gate_up = pool.zeros(DType::f32, {4, 10});
  const Tensor weights = pool.zeros(DType::f32, {2, 2}), slots = pool.zeros(DType::i32, {4});
  const auto message = [&](const Tensor& of_gate_up, const Tensor& of_weights, const Tensor& of_slots) {
    return error_of([&] { weighted_swiglu_forward(ctx, y, of_gate_up, of_weights, of_slots, {}); });
  };
  CHECK(message(gate_up, weights, slots) == "no error");
  CHECK_THAT(message(gate_up.rows(0, 3), weights, slots), Catch::Contains("weighted_swiglu_forward: "));
  CHECK_THAT(message(gate_up, pool.zeros(DType::f64, {2, 2}), slots),
             Catch::Contains("weighted_swiglu_forward: weights"));
  CHECK_THAT(message(gate_up, weights, pool.zeros(DType::i32, {3})),
             Catch::Contains("weighted_swiglu_forward: slots"));
}
