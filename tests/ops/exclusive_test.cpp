#include "ops/exclusive.h"

#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Shape {
  int64_t T, H, Hkv, D;
};
constexpr Shape kShapes[] = {{1, 1, 1, 2}, {5, 4, 2, 6}, {9, 6, 6, 16}, {40, 8, 1, 33}};

}  // namespace

TEST_CASE("exclusive attention agrees over types and threads, in place and apart", "[exclusive]") {
  for (const Shape& g : kShapes)
    for (const bool learned : {false, true}) {
      INFO(g.T << " " << g.H << " " << g.Hkv << " " << g.D << (learned ? " learned" : ""));
      check_op([&](Pool& pool, Context& ctx, DType type) {
        const Tensor y = exact_normal(pool, type, {g.T, g.H, g.D}),
                     v = exact_normal(pool, type, {g.T, g.Hkv, g.D}),
                     dz = exact_normal(pool, type, {g.T, g.H, g.D});
        const Tensor s = learned ? exact_normal(pool, type, {g.H}) : Tensor();
        const Tensor ds = learned ? pool.zeros(accumulate_dtype(type), {g.H}) : Tensor();
        const Tensor z = pool.zeros(type, {g.T, g.H, g.D}), in_place = pool.copy(y, type),
                     dy = pool.copy(dz, type), dv = pool.zeros(type, {g.T, g.Hkv, g.D});
        exclusive_forward(ctx, z, y, v, s);
        exclusive_forward(ctx, in_place, in_place, v, s);
        exclusive_backward(ctx, dy, dv, ds, dy, y, v, s);
        std::vector<Tensor> out = {z, in_place, dy, dv};
        if (learned) out.push_back(ds);
        return out;
      });
    }
}

TEST_CASE("exclusive attention's output is orthogonal to the token's own value", "[exclusive]") {
  Pool pool;
  Context ctx(kTestScratch);
  const int64_t T = 7, H = 6, Hkv = 2, D = 24;
  const Tensor y = pool.normal(DType::f64, {T, H, D}, 3), v = pool.normal(DType::f64, {T, Hkv, D}),
               z = pool.zeros(DType::f64, {T, H, D});
  exclusive_forward(ctx, z, y, v, {});
  for (int64_t t = 0; t < T; ++t)
    for (int64_t h = 0; h < H; ++h) {
      double with_own = 0, before = 0, with_other = 0;
      for (int64_t d = 0; d < D; ++d) {
        const double own = Pool::get(v, (t * Hkv + h / (H / Hkv)) * D + d),
                     other = Pool::get(v, (t * Hkv + 1 - h / (H / Hkv)) * D + d);
        with_own += Pool::get(z, (t * H + h) * D + d) * own;
        before += Pool::get(y, (t * H + h) * D + d) * own;
        with_other += Pool::get(z, (t * H + h) * D + d) * other;
      }
      CHECK(std::abs(with_own) < 1e-12);
      CHECK(std::abs(before) > 1e-6);
      CHECK(std::abs(with_other) > 1e-6);
    }
}

TEST_CASE("exclusive attention with a scale of 0 is the identity bit for bit", "[exclusive]") {
  for (const DType type : kFloatingTypes) {
    Pool pool;
    Context ctx(kTestScratch);
    const Tensor y = pool.normal(type, {5, 4, 6}), v = pool.normal(type, {5, 2, 6}),
                 z = pool.zeros(type, {5, 4, 6}), s = pool.zeros(type, {4});
    exclusive_forward(ctx, z, y, v, s);
    CHECK(same_bits(z, y));
  }
}

TEST_CASE("a value of length 0 removes nothing", "[exclusive]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor y = pool.normal(DType::f64, {2, 2, 4}), dz = pool.normal(DType::f64, {2, 2, 4}),
               v = pool.zeros(DType::f64, {2, 1, 4}), z = pool.zeros(DType::f64, {2, 2, 4}),
               dy = pool.zeros(DType::f64, {2, 2, 4}), dv = pool.normal(DType::f64, {2, 1, 4});
  exclusive_forward(ctx, z, y, v, {});
  CHECK(same_bits(z, y));
  exclusive_backward(ctx, dy, dv, {}, dz, y, v, {});
  CHECK(same_bits(dy, dz));
  for (int64_t i = 0; i < dv.numel(); ++i) CHECK(Pool::get(dv, i) == 0);
}

TEST_CASE("gradients of exclusive attention equal central differences", "[exclusive][gradient]") {
  for (const Shape& g : kShapes)
    for (const bool learned : {false, true}) {
      Pool pool;
      Context ctx(kTestScratch);
      const Tensor y = pool.normal(DType::f64, {g.T, g.H, g.D}),
                   v = pool.normal(DType::f64, {g.T, g.Hkv, g.D}),
                   dz = pool.normal(DType::f64, {g.T, g.H, g.D}), z = pool.zeros(DType::f64, {g.T, g.H, g.D}),
                   dy = pool.normal(DType::f64, {g.T, g.H, g.D}),
                   dv = pool.normal(DType::f64, {g.T, g.Hkv, g.D});
      const Tensor s = learned ? pool.normal(DType::f64, {g.H}) : Tensor(),
                   ds = learned ? pool.normal(DType::f64, {g.H}) : Tensor(),
                   before = learned ? pool.copy(ds, DType::f64) : Tensor();
      const auto loss = [&] { return exclusive_forward(ctx, z, y, v, s), dot(dz, z); };
      exclusive_backward(ctx, dy, dv, ds, dz, y, v, s);
      CHECK(gradient_error(y, dy, loss) <= kGradientTolerance);
      CHECK(gradient_error(v, dv, loss) <= kGradientTolerance);
      if (!learned) continue;
      for (int64_t h = 0; h < g.H; ++h)
        Pool::set(ds, h, Pool::get(ds, h) - Pool::get(before, h));  // accumulated
      CHECK(gradient_error(s, ds, loss) <= kGradientTolerance);
    }
}

TEST_CASE("exclusive attention refuses shapes that do not fit, by name", "[exclusive]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor y = pool.zeros(DType::f32, {4, 6, 8}), s = pool.zeros(DType::f32, {6});
  const auto message = [&](const Tensor& v, const Tensor& scale) {
    return error_of([&] { exclusive_forward(ctx, y, y, v, scale); });
  };
  CHECK(message(pool.zeros(DType::f32, {4, 4, 8}), {}).find("Hkv a divisor of 6") != std::string::npos);
  CHECK(message(pool.zeros(DType::f64, {4, 2, 8}), {}).find("exclusive_forward: v must be") !=
        std::string::npos);
  CHECK(message(pool.zeros(DType::f32, {4, 2, 8}), pool.zeros(DType::f32, {2})).find("s") !=
        std::string::npos);
  const Tensor v = pool.zeros(DType::f32, {4, 2, 8}), dv = pool.zeros(DType::f32, {4, 2, 8});
  CHECK(error_of([&] { exclusive_backward(ctx, y, dv, {}, y, y, v, s); }).find("ds must be given") !=
        std::string::npos);
}
