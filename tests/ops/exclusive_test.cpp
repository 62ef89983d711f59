#include "ops/exclusive.h"

#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Shape {
  int64_t T, H, Hkv, D;
};
constexpr Shape kShapes[] = {{1, 1, 1, 2}, {5, 4, 2, 6}, {9, 6, 6, 16}, {40, 8, 1, 33}};

/// y, a rounded multiple of v by head, and what is made of it.
struct Parallel {
  Parallel(DType type, std::initializer_list<double> factors, const Tensor& scales, bool is_normed)
      : dtype(type),
        H(static_cast<int64_t>(factors.size())),
        normed(is_normed),
        s(scales),
        v(exact_normal(pool, type, {T, 1, D})),
        y(pool.zeros(type, {T, H, D})),
        dz(exact_normal(pool, type, {T, H, D})),
        z(pool.normal(type, {T, H, D})),
        dy(pool.normal(type, {T, H, D})),
        dv(pool.normal(type, {T, 1, D})),
        ds(s ? pool.zeros(accumulate_dtype(type), {H}) : Tensor()) {
    for (int64_t i = 0; i < y.numel(); ++i)
      Pool::set(y, i, factors.begin()[i / D % H] * Pool::get(v, i / (H * D) * D + i % D));
  }
  void run() {
    Context ctx(kTestScratch);
    exclusive_forward(ctx, z, y, v, s, normed);
    exclusive_backward(ctx, dy, dv, ds, dz, y, v, s, normed);
  }
  double scale(int64_t h) const { return s ? Pool::get(s, h) : 1; }
  /// (1 - s) x, rounded once.
  Tensor kept(const Tensor& x) {
    const Tensor all = pool.zeros(dtype, {T, H, D});
    for (int64_t i = 0; i < x.numel(); ++i) Pool::set(all, i, (1 - scale(i / D % H)) * Pool::get(x, i));
    return all;
  }
  bool no_gradient_of_value() const {
    for (int64_t i = 0; i < dv.numel(); ++i)
      if (Pool::get(dv, i) != 0) return false;
    return true;
  }

  static constexpr int64_t T = 6, D = 40;
  Pool pool;
  DType dtype;
  int64_t H;
  bool normed;
  Tensor s, v, y, dz, z, dy, dv, ds;
};

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

TEST_CASE("an output parallel to the token's own value has no remainder, and its gradients cancel exactly",
          "[exclusive]") {
  Pool pool;
  for (const DType type : kFloatingTypes)
    for (const bool normed : {false, true})
      for (const bool learned : {false, true}) {
        INFO(dtype_name(type) << (normed ? " normed" : "") << (learned ? " learned" : ""));
        const Tensor s = learned ? pool.zeros(type, {3}) : Tensor();
        if (learned) Pool::set(s, 0, 1), Pool::set(s, 1, 0), Pool::set(s, 2, 0.75);
        // In bf16 a multiple by another factor than a power of 2 is parallel up to rounding of bf16 alone.
        const bool any_factor = normed || type != DType::bf16;
        Parallel p(type, {any_factor ? 0.37 : 1.0, any_factor ? -1.7 : 0.5, any_factor ? 0.0123 : 4.0}, s,
                   normed);
        p.run();
        CHECK(same_bits(p.z, p.kept(p.y)));
        CHECK(same_bits(p.dy, p.kept(p.dz)));
        CHECK(p.no_gradient_of_value());
        for (int64_t h = 0; learned && h < p.H; ++h) {
          double expected = 0;
          for (int64_t i = 0; i < p.y.numel(); ++i)
            if (i / p.D % p.H == h) expected -= Pool::get(p.dz, i) * Pool::get(p.y, i);
          CHECK(Pool::get(p.ds, h) == Approx(expected).epsilon(type == DType::bf16 ? 2e-2 : 1e-4));
        }
      }
}

TEST_CASE("what exceeds the rounding of an output keeps value and gradient", "[exclusive]") {
  const auto ordinary = [](Parallel& p) {
    p.run();
    return !same_bits(p.z, p.kept(p.y)) && !same_bits(p.dy, p.kept(p.dz)) && !p.no_gradient_of_value();
  };
  for (const DType type : kFloatingTypes) {
    INFO(dtype_name(type));
    Parallel p(type, {0.37}, {}, true);
    const double much = 4 * exclusive_rounding(type, true);
    for (int64_t i = 0; i < p.y.numel(); ++i)
      Pool::set(p.y, i, Pool::get(p.y, i) * (1 + (i % 2 ? much : -much)));
    CHECK(ordinary(p));
  }
  // Without a norm behind it the rounding of bf16 is no more than that.
  Parallel rounded(DType::bf16, {0.37}, {}, false);
  CHECK(ordinary(rounded));
  // An output of 0 has every direction.
  Parallel none(DType::f32, {0}, {}, true);
  none.run();
  CHECK_FALSE(same_bits(none.dy, none.kept(none.dz)));
  Parallel broken(DType::f32, {0.37}, {}, true);
  Pool::set(broken.y, 3, std::numeric_limits<double>::quiet_NaN());
  broken.run();
  CHECK(std::isnan(Pool::get(broken.z, 3)));
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
  CHECK(
      message(pool.zeros(DType::f32, {4, 2, 8}), pool.zeros(DType::f32, {2})).find("exclusive_forward: s ") !=
      std::string::npos);
  const Tensor v = pool.zeros(DType::f32, {4, 2, 8}), dv = pool.zeros(DType::f32, {4, 2, 8});
  CHECK(error_of([&] { exclusive_backward(ctx, y, dv, {}, y, y, v, s); }).find("ds must be given") !=
        std::string::npos);
}
