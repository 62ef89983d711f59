#include "ops/switch_heads.h"

#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Shape {
  int64_t T, H, E, K, w, D;
};
// One expert; all of them; a few of many; parts of a head that overlap, that do not, and that few write; long
// channels.
constexpr Shape kShapes[] = {{5, 2, 1, 1, 4, 4}, {4, 3, 4, 4, 6, 6},   {7, 2, 8, 2, 4, 4},
                             {5, 2, 8, 8, 5, 5}, {6, 2, 4, 4, 4, 16},  {9, 1, 8, 2, 3, 12},
                             {3, 2, 8, 8, 2, 4}, {2, 2, 5, 3, 70, 140}};

struct Experts {
  Tensor v, chosen, logits, projected;
  Experts(Pool& pool, DType type, const Shape& s)
      : v(pool.zeros(type, {s.T, s.H, s.D})),
        chosen(pool.zeros(DType::i32, {s.T, s.H, s.K})),
        logits(exact_normal(pool, type, {s.T, s.H, s.E}, 2)),
        projected(exact_normal(pool, type, {s.T, s.H, s.E, s.w})) {}
};

}  // namespace

TEST_CASE("switch heads sum the selected experts weighted by their scores, into the channels of each",
          "[switch_heads]") {
  Pool pool(3);
  Context ctx(kTestScratch);
  for (const Shape& s : kShapes) {
    const Experts x(pool, DType::f64, s);
    switch_heads_forward(ctx, x.v, x.chosen, x.logits, x.projected);
    for (int64_t row = 0; row < s.T * s.H; ++row) {
      std::vector<int64_t> order;  // straight from the definition
      for (int64_t e = 0; e < s.E; ++e) order.push_back(e);
      const auto z = [&](int64_t e) { return Pool::get(x.logits, row * s.E + e); };
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return z(a) > z(b); });
      std::vector<double> expected(static_cast<size_t>(s.D), 0.0);
      for (int64_t k = 0; k < s.K; ++k) {
        const int64_t e = order[static_cast<size_t>(k)];
        CHECK(Pool::get(x.chosen, row * s.K + k) == static_cast<double>(e));
        for (int64_t i = 0; i < s.w; ++i)
          expected[static_cast<size_t>((e * s.w + i) % s.D)] +=
              Pool::get(x.projected, (row * s.E + e) * s.w + i) / (1 + std::exp(-z(e)));
      }
      for (int64_t c = 0; c < s.D; ++c)
        CHECK(Pool::get(x.v, row * s.D + c) == Approx(expected[static_cast<size_t>(c)]).margin(1e-14));
    }
  }
}

TEST_CASE("switch heads: gradients equal central differences", "[switch_heads]") {
  Pool pool(4);
  Context ctx(kTestScratch);
  for (const Shape& s : kShapes) {
    const Experts x(pool, DType::f64, s);
    const Tensor dv = pool.normal(DType::f64, {s.T, s.H, s.D});
    const auto loss = [&] {
      switch_heads_forward(ctx, x.v, x.chosen, x.logits, x.projected);
      return dot(dv, x.v);
    };
    loss();
    const Tensor dlogits = pool.normal(DType::f64, {s.T, s.H, s.E}),
                 dprojected = pool.normal(DType::f64, {s.T, s.H, s.E, s.w});
    switch_heads_backward(ctx, dlogits, dprojected, dv, x.logits, x.projected, x.chosen);
    INFO("E " << s.E << " K " << s.K << " w " << s.w << " D " << s.D);
    CHECK(gradient_error(x.logits, dlogits, loss, 100, 1e-7) <=
          kGradientTolerance);  // a larger step would change the selection
    CHECK(gradient_error(x.projected, dprojected, loss) <= kGradientTolerance);
  }
}

TEST_CASE("switch heads agree over storage types and threads", "[switch_heads]") {
  for (const Shape& s : kShapes)
    check_op([&](Pool& pool, Context& ctx, DType type) -> std::vector<Tensor> {
      const Experts x(pool, type, s);
      switch_heads_forward(ctx, x.v, x.chosen, x.logits, x.projected);
      const Tensor dlogits = pool.normal(type, {s.T, s.H, s.E}),
                   dprojected = pool.normal(type, {s.T, s.H, s.E, s.w});
      switch_heads_backward(ctx, dlogits, dprojected, exact_normal(pool, type, {s.T, s.H, s.D}), x.logits,
                            x.projected, x.chosen);
      return {x.v, x.chosen, dlogits, dprojected};
    });
}

TEST_CASE("switch heads: ties go to the lower index, and NaN is selected and visible", "[switch_heads]") {
  Pool pool;
  Context ctx(kTestScratch);
  Experts x(pool, DType::f32, {3, 1, 4, 2, 2, 2});
  const double logits[] = {1, 2, 2, 2, 1, 1, 1, 1, 5, NAN, 7, 0};
  for (int64_t i = 0; i < 12; ++i) Pool::set(x.logits, i, logits[i]);
  switch_heads_forward(ctx, x.v, x.chosen, x.logits, x.projected);
  const int32_t expected[] = {1, 2, 0, 1, 1, 2};
  for (int64_t i = 0; i < 6; ++i) CHECK(x.chosen.as<int32_t>()[i] == expected[i]);
  CHECK(std::isfinite(Pool::get(x.v, 3)));
  CHECK(std::isnan(Pool::get(x.v, 4)));
}

TEST_CASE("switch heads refuse wrong arguments by name", "[switch_heads]") {
  Pool pool;
  Context ctx(kTestScratch);
  const auto message = [&](Shape s) {
    return error_of([&] {
      const Experts x(pool, DType::f32, s);
      switch_heads_forward(ctx, x.v, x.chosen, x.logits, x.projected);
    });
  };
  CHECK(message({2, 1, 4, 2, 3, 4}) ==
        "switch_heads_forward: an expert's 3 channels do not divide the head's 4");
  CHECK(message({2, 1, 4, 5, 4, 4}) == "switch_heads_forward: 5 of 4 experts; at most 32 of 1024");
}
