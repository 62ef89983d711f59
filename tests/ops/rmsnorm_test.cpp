#include "ops/rmsnorm.h"

#include "ops/elementwise.h"
#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr double kEps = 1e-6;

struct Size {
  int64_t rows, width, groups;  // groups 0: the weight is (D)
};
constexpr Size kSizes[] = {{1, 3, 0}, {5, 17, 0}, {6, 33, 3}, {300, 130, 1}, {2000, 16, 4}, {3000, 7, 0}};

Tensor weight_of(Pool& pool, DType type, const Size& s) {
  return s.groups ? exact_normal(pool, type, {s.groups, s.width}) : exact_normal(pool, type, {s.width});
}

}  // namespace

TEST_CASE("rmsnorm agrees over types and threads, at odd sizes", "[rmsnorm]") {
  for (const Size& s : kSizes)
    for (const Into into : {Into::overwrite, Into::add}) {
      INFO(s.rows << " rows of " << s.width << ", groups " << s.groups);
      check_op([&](Pool& pool, Context& ctx, DType type) {
        const DType acc = accumulate_dtype(type);
        const Tensor x = exact_normal(pool, type, {s.rows, s.width}),
                     dy = exact_normal(pool, type, {s.rows, s.width});
        const Tensor weight = weight_of(pool, type, s), dweight = pool.copy(weight, acc);
        const Tensor y = pool.zeros(type, {s.rows, s.width}), rstd = pool.zeros(acc, {s.rows});
        const Tensor dx = exact_normal(pool, type, {s.rows, s.width});
        rmsnorm_forward(ctx, y, rstd, x, weight, kEps);
        rmsnorm_backward(ctx, dx, dweight, dy, x, weight, rstd, into);
        return std::vector{y, rstd, dx, dweight};
      });
    }
}

TEST_CASE("rmsnorm equals its formula; row i uses weight row i mod G", "[rmsnorm]") {
  Pool pool;
  Context ctx(kTestScratch);
  const int64_t T = 4, G = 3, D = 5;
  const Tensor x = pool.normal(DType::f64, {T, G, D}), weight = pool.normal(DType::f64, {G, D});
  const Tensor y = pool.zeros(DType::f64, {T, G, D}), rstd = pool.zeros(DType::f64, {T, G});
  rmsnorm_forward(ctx, y, rstd, x, weight, 0.25);
  for (int64_t i = 0; i < T * G; ++i) {
    double squares = 0;
    for (int64_t c = 0; c < D; ++c) squares += Pool::get(x, i * D + c) * Pool::get(x, i * D + c);
    const double r = 1 / std::sqrt(squares / D + 0.25);
    CHECK(Pool::get(rstd, i) == Approx(r).epsilon(1e-14));
    for (int64_t c = 0; c < D; ++c)
      CHECK(Pool::get(y, i * D + c) ==
            Approx(Pool::get(weight, i % G * D + c) * Pool::get(x, i * D + c) * r).epsilon(1e-13));
  }
}

TEST_CASE("rmsnorm gradients equal central differences", "[rmsnorm]") {
  Context ctx(kTestScratch);
  for (const Size& s : {Size{1, 1, 0}, Size{5, 17, 0}, Size{12, 9, 4}, Size{40, 6, 1}}) {
    INFO(s.rows << " rows of " << s.width << ", groups " << s.groups);
    Pool pool(3);
    const Tensor x = pool.normal(DType::f64, {s.rows, s.width}), weight = weight_of(pool, DType::f64, s);
    const Tensor y = pool.zeros(DType::f64, {s.rows, s.width}), rstd = pool.zeros(DType::f64, {s.rows});
    const Tensor dy = pool.normal(DType::f64, {s.rows, s.width}),
                 dx = pool.normal(DType::f64, {s.rows, s.width});
    const Tensor dweight = pool.copy(weight, DType::f64);
    for (int64_t i = 0; i < dweight.numel(); ++i) Pool::set(dweight, i, 0);
    // An eps that matters: one element alone would otherwise have no gradient to speak of.
    const double eps = 0.5;
    const auto loss = [&] {
      rmsnorm_forward(ctx, y, rstd, x, weight, eps);
      return dot(dy, y);
    };
    loss();
    rmsnorm_backward(ctx, dx, dweight, dy, x, weight, rstd, Into::overwrite);
    CHECK(gradient_error(x, dx, loss) <= kGradientTolerance);
    CHECK(gradient_error(weight, dweight, loss) <= kGradientTolerance);
  }
}

TEST_CASE("rmsnorm works in place, adds with Into::add, and accumulates its weight gradient", "[rmsnorm]") {
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes) {
    INFO(dtype_name(type));
    Pool pool;
    const DType acc = accumulate_dtype(type);
    const int64_t R = 65, D = 37;
    const Tensor x = pool.normal(type, {R, D}), weight = pool.normal(type, {D}),
                 dy = pool.normal(type, {R, D});
    const Tensor y = pool.zeros(type, {R, D}), rstd = pool.zeros(acc, {R}), rstd2 = pool.zeros(acc, {R});
    const Tensor dx = pool.zeros(type, {R, D}), dw = pool.zeros(acc, {D}), dw2 = pool.zeros(acc, {D});
    rmsnorm_forward(ctx, y, rstd, x, weight, kEps);
    rmsnorm_backward(ctx, dx, dw, dy, x, weight, rstd, Into::overwrite);

    const Tensor x2 = pool.copy(x, type), dy2 = pool.copy(dy, type);
    rmsnorm_forward(ctx, x2, rstd2, x2, weight, kEps);
    CHECK(same_bits(x2, y));
    CHECK(same_bits(rstd2, rstd));
    rmsnorm_backward(ctx, dy2, dw2, dy2, x, weight, rstd, Into::overwrite);
    CHECK(same_bits(dy2, dx));
    CHECK(same_bits(dw2, dw));

    const Tensor base = pool.normal(type, {R, D}), onto = pool.copy(base, type);
    rmsnorm_backward(ctx, onto, dw2, dy, x, weight, rstd, Into::add);
    const Tensor expected = pool.zeros(DType::f64, {R, D}), twice = pool.zeros(DType::f64, {D});
    for (int64_t i = 0; i < R * D; ++i) Pool::set(expected, i, Pool::get(base, i) + Pool::get(dx, i));
    for (int64_t i = 0; i < D; ++i) Pool::set(twice, i, 2 * Pool::get(dw, i));
    CHECK(relative_error(onto, expected) <= tolerance(type));
    CHECK(relative_error(dw2, twice) <= tolerance(acc));
  }
}

TEST_CASE("rmsnorm refuses wrong arguments by name", "[rmsnorm]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor x = pool.zeros(DType::bf16, {4, 6}), weight = pool.zeros(DType::bf16, {6}),
               rstd = pool.zeros(DType::f32, {4});
  const Tensor wrong = pool.zeros(DType::bf16, {5}), dweight = pool.zeros(DType::f32, {6});
  CHECK(error_of([&] { rmsnorm_forward(ctx, x, rstd, x, wrong, kEps); }) ==
        "rmsnorm_forward: weight must be (6) or (G, 6) bf16, got (5) bf16");
  CHECK(error_of([&] { rmsnorm_forward(ctx, x, weight, x, weight, kEps); }) ==
        "rmsnorm_forward: rstd must hold 4 elements of f32, got (6) bf16");
  CHECK(error_of([&] { rmsnorm_forward(ctx, weight, rstd, x, weight, kEps); }) ==
        "rmsnorm_forward: y must be (4, 6) bf16, got (6) bf16");
  const Tensor groups = pool.zeros(DType::bf16, {3, 6});
  CHECK(error_of([&] { rmsnorm_forward(ctx, x, rstd, x, groups, kEps); }) ==
        "rmsnorm_forward: 4 rows of x cannot share 3 rows of weight");
  CHECK(error_of([&] { rmsnorm_backward(ctx, x, weight, x, x, weight, rstd, Into::add); }) ==
        "rmsnorm_backward: dweight must have the shape of weight, (6) bf16, and be f32, got (6) bf16");
  CHECK(error_of([&] { rmsnorm_backward(ctx, x, dweight, wrong, x, weight, rstd, Into::add); }) ==
        "rmsnorm_backward: dy must be (4, 6) bf16, got (5) bf16");
}

TEST_CASE("rmsnorm without a weight equals one with ones bit for bit, forward and backward", "[rmsnorm]") {
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes)
    for (const int64_t width : {7, 64}) {
      CAPTURE(dtype_name(type), width);
      Pool pool;
      const int64_t rows = 300;
      const DType wide = accumulate_dtype(type);
      const Tensor x = pool.normal(type, {rows, width}), dy = pool.normal(type, {rows, width}),
                   ones = pool.zeros(type, {width});
      for (int64_t i = 0; i < width; ++i) Pool::set(ones, i, 1);
      Tensor results[2][3];
      for (const bool weight : {false, true}) {
        Tensor* out = results[weight];
        out[0] = pool.zeros(type, {rows, width}), out[1] = pool.zeros(wide, {rows}),
        out[2] = pool.copy(dy, type);
        const Tensor w = weight ? ones : Tensor(), dw = weight ? pool.zeros(wide, {width}) : Tensor();
        rmsnorm_forward(ctx, out[0], out[1], x, w, 1e-5);
        rmsnorm_backward(ctx, out[2], dw, dy, x, w, out[1], Into::overwrite);
        rmsnorm_backward(ctx, out[2], dw, dy, x, w, out[1], Into::add);
      }
      CHECK(same_bits(results[0][0], results[1][0]));
      CHECK(same_bits(results[0][1], results[1][1]));
      CHECK(relative_error(results[0][2], results[1][2]) <= (type == DType::bf16 ? 1e-2 : 1e-6));
    }
}

TEST_CASE("the norm of a sum has the bits of the sum, then the norm", "[rmsnorm]") {
  for (const Size& s : kSizes)
    check_op([&](Pool& pool, Context& ctx, DType type) {
      const DType acc = accumulate_dtype(type);
      const Tensor a = exact_normal(pool, type, {s.rows, s.width}),
                   b = exact_normal(pool, type, {s.rows, s.width}), weight = weight_of(pool, type, s);
      const auto zeros = [&] { return pool.zeros(type, {s.rows, s.width}); };
      const Tensor sum = zeros(), y = zeros(), rstd = pool.zeros(acc, {s.rows}), expected_sum = zeros(),
                   expected = zeros(), expected_rstd = pool.zeros(acc, {s.rows});
      add_forward(ctx, expected_sum, a, b);
      rmsnorm_forward(ctx, expected, expected_rstd, expected_sum, weight, kEps);
      add_rmsnorm_forward(ctx, sum, y, rstd, a, b, weight, kEps);
      add_rmsnorm_forward(ctx, a, y, rstd, a, b, weight, kEps);
      if (!ctx.dry_run) {
        CHECK(same_bits(sum, expected_sum));
        CHECK(same_bits(a, expected_sum));
        CHECK(same_bits(y, expected));
        CHECK(same_bits(rstd, expected_rstd));
      }
      return std::vector{sum, y, rstd};
    });
}
