// The router compared with plain loops, its gradients with central differences, and unusual rows.
#include "ops/router.h"

#include <limits>
#include <numeric>
#include <set>

#include "ops/op_support.h"
#include "ops/permute.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Routed {
  Tensor probabilities, lse, weights, experts;
};
Routed make_routed(Pool& pool, DType wide, int64_t T, int64_t E, int64_t K) {
  return {pool.zeros(wide, {T, E}), pool.zeros(wide, {T}), pool.zeros(wide, {T, K}),
          pool.zeros(DType::i32, {T, K})};
}
Routed route(Pool& pool, Context& ctx, const Tensor& logits, int64_t K, bool norm) {
  const Routed r = make_routed(pool, logits.dtype, logits.dim(0), logits.dim(1), K);
  route_forward(ctx, r.probabilities, r.lse, r.weights, r.experts, logits, norm);
  return r;
}

constexpr int64_t kShapes[][3] = {{1, 1, 1}, {5, 7, 2}, {70, 16, 16}, {301, 64, 8}, {9, 130, 32}};

}  // namespace

TEST_CASE("routing is a softmax, its largest entries, and their normalised weights", "[router]") {
  Context ctx(kTestScratch);
  for (const auto& [T, E, K] : kShapes)
    for (const bool norm : {false, true}) {
      CAPTURE(T, E, K, norm);
      Pool pool;
      const Tensor logits = pool.normal(DType::f64, {T, E}, 2);
      const Routed r = route(pool, ctx, logits, K, norm);
      for (int64_t t = 0; t < T; ++t) {
        double sum = 0;
        for (int64_t e = 0; e < E; ++e) sum += std::exp(Pool::get(logits, t * E + e));
        CHECK(Pool::get(r.lse, t) == Approx(std::log(sum)).epsilon(1e-13).margin(1e-13));
        std::vector<int64_t> order(static_cast<size_t>(E));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
          return Pool::get(logits, t * E + a) > Pool::get(logits, t * E + b);
        });
        double chosen = 0;
        for (int64_t k = 0; k < K; ++k)
          chosen += std::exp(Pool::get(logits, t * E + order[static_cast<size_t>(k)])) / sum;
        for (int64_t k = 0; k < K; ++k) {
          const int64_t e = order[static_cast<size_t>(k)];
          REQUIRE(r.experts.as<int32_t>()[t * K + k] == e);
          const double p = std::exp(Pool::get(logits, t * E + e)) / sum;
          CHECK(Pool::get(r.probabilities, t * E + e) == Approx(p).epsilon(1e-13));
          CHECK(Pool::get(r.weights, t * K + k) == Approx(norm ? p / chosen : p).epsilon(1e-13));
        }
      }
    }
}

TEST_CASE("router ops agree over types and threads", "[router]") {
  for (const auto& shape : kShapes)
    for (const bool norm : {false, true}) {
      const int64_t T = shape[0], E = shape[1], K = shape[2], C = 24;
      CAPTURE(T, E, K, norm);
      check_op(
          [&](Pool& pool, Context& ctx, DType type) {
            const DType wide = accumulate_dtype(type);
            const Tensor z = exact_normal(pool, wide, {T, E}, 2), dweights = exact_normal(pool, wide, {T, K});
            Context real(kTestScratch);  // so that the tensors exist that a dry run must not read
            const Routed r = route(pool, real, z, K, norm);
            const Routed out = make_routed(pool, wide, T, E, K);
            const Tensor counts = pool.zeros(DType::f64, {E}),
                         totals = pool.zeros(DType::f64, {router_totals_size(E)});
            const Permutation p{pool.zeros(DType::i32, {E + 1}), pool.zeros(DType::i32, {T * K}),
                                pool.zeros(DType::i32, {T * K}), pool.zeros(DType::i32, {T, K})};
            permute_plan(real, p, r.experts);
            const Tensor dlogits = pool.zeros(wide, {T, E});
            route_forward(ctx, out.probabilities, out.lse, out.weights, out.experts, z, norm);
            router_load(ctx, counts, totals, p.offsets, r.probabilities, r.lse);
            route_backward(ctx, dlogits, dweights, r.probabilities, r.lse, r.weights, r.experts, counts, norm,
                           {0.3, 0.2});

            LinearWeight w;
            w.value = exact_normal(pool, type, {E, C});
            const Tensor x = exact_normal(pool, type, {T, C}), dx = exact_normal(pool, type, {T, C});
            const Tensor logits = pool.zeros(wide, {T, E}), dw = pool.zeros(wide, {E, C});
            router_logits_forward(ctx, logits, x, w);
            router_logits_backward(ctx, dx, dw, z, x, w, Into::add);
            return std::vector{out.probabilities,
                               out.lse,
                               out.weights,
                               out.experts,
                               dlogits,
                               totals,
                               counts,
                               logits,
                               dx,
                               dw};
          },
          7);
    }
}

TEST_CASE("the gradient of the logits combines weights, balance loss and z-loss", "[router]") {
  Context ctx(kTestScratch);
  for (const bool norm : {false, true}) {
    CAPTURE(norm);
    Pool pool;
    const int64_t T = 11, E = 7, K = 3;
    const Tensor logits = pool.normal(DType::f64, {T, E}), dweights = pool.normal(DType::f64, {T, K});
    const Tensor counts = pool.zeros(DType::f64, {E}), dlogits = pool.zeros(DType::f64, {T, E});
    for (int64_t e = 0; e < E; ++e)
      Pool::set(counts, e, static_cast<double>(3 + 5 * e));  // any counts: they are constants
    const RouterLossScale scale{.balance = 0.7, .z = 0.4};
    const double total = 3.0 * static_cast<double>(E) + 5.0 * static_cast<double>(E * (E - 1) / 2);
    const auto loss = [&] {
      const Routed r = route(pool, ctx, logits, K, norm);
      double s = dot(dweights, r.weights);
      for (int64_t t = 0; t < T; ++t) {
        s += scale.z * std::pow(Pool::get(r.lse, t), 2);
        for (int64_t e = 0; e < E; ++e)
          s += scale.balance * static_cast<double>(E) * Pool::get(counts, e) / total *
               Pool::get(r.probabilities, t * E + e);
      }
      return s;
    };
    const Routed r = route(pool, ctx, logits, K, norm);
    route_backward(ctx, dlogits, dweights, r.probabilities, r.lse, r.weights, r.experts, counts, norm, scale);
    CHECK(gradient_error(logits, dlogits, loss) <= kGradientTolerance);
  }
}

TEST_CASE("gradients of the router's products equal central differences", "[router]") {
  Context ctx(kTestScratch);
  Pool pool;
  LinearWeight w;
  w.value = pool.normal(DType::f64, {5, 6});
  const Tensor x = pool.normal(DType::f64, {9, 6}), logits = pool.zeros(DType::f64, {9, 5}),
               d = pool.normal(DType::f64, {9, 5});
  const Tensor dx = pool.normal(DType::f64, {9, 6}), added = pool.copy(dx, DType::f64),
               dw = pool.zeros(DType::f64, {5, 6});
  const auto loss = [&] { return router_logits_forward(ctx, logits, x, w), dot(d, logits); };
  router_logits_backward(ctx, dx, dw, d, x, w, Into::overwrite);
  CHECK(gradient_error(x, dx, loss) <= kGradientTolerance);
  CHECK(gradient_error(w.value, dw, loss) <= kGradientTolerance);
  const Tensor before = pool.copy(added, DType::f64);
  router_logits_backward(ctx, added, dw, d, x, w, Into::add);
  for (int64_t i = 0; i < dx.numel(); ++i)
    CHECK(Pool::get(added, i) == Approx(Pool::get(before, i) + Pool::get(dx, i)));
}

TEST_CASE("ties go to the lower index, largest first", "[router]") {
  Context ctx(kTestScratch);
  for (const DType type : {DType::f32, DType::f64}) {
    Pool pool;
    const Tensor logits = pool.zeros(type, {2, 6});  // row 0: all alike
    const double row[] = {1, 3, 2, 3, 2, 3};
    for (int64_t e = 0; e < 6; ++e) Pool::set(logits, 6 + e, row[e]);
    const Routed r = route(pool, ctx, logits, 4, true);
    const int32_t expected[] = {0, 1, 2, 3, 1, 3, 5, 2};
    for (int64_t i = 0; i < 8; ++i) CHECK(r.experts.as<int32_t>()[i] == expected[i]);
  }
}

TEST_CASE("a non-finite row still has K distinct experts, and non-finite weights", "[router]") {
  Context ctx(kTestScratch);
  for (const DType type : {DType::f32, DType::f64})
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
      for (const int64_t where : {0, 3, 8}) {
        CAPTURE(dtype_name(type), bad, where);
        Pool pool;
        const int64_t E = 9, K = 4;
        const Tensor logits = pool.normal(type, {3, E});
        Pool::set(logits, E + where, bad);
        if (where == 8)
          for (int64_t e = 0; e < E; ++e) Pool::set(logits, E + e, bad);
        const Routed r = route(pool, ctx, logits, K, true);
        for (int64_t t = 0; t < 3; ++t) {
          std::set<int32_t> different;
          bool finite = true;
          for (int64_t k = 0; k < K; ++k) {
            const int32_t e = r.experts.as<int32_t>()[t * K + k];
            CHECK((e >= 0 && e < E));
            different.insert(e);
            finite = finite && std::isfinite(Pool::get(r.weights, t * K + k));
          }
          CHECK(different.size() == static_cast<size_t>(K));
          CHECK(finite == (t != 1));
        }
      }
}

TEST_CASE("router totals contain the sums that losses and log need", "[router]") {
  Context ctx(kTestScratch);
  Pool pool;
  const int64_t T = 30, E = 5, K = 2;
  const Tensor logits = pool.normal(DType::f64, {T, E});
  const Routed r = route(pool, ctx, logits, K, true);
  const Permutation p{pool.zeros(DType::i32, {E + 1}), pool.zeros(DType::i32, {T * K}),
                      pool.zeros(DType::i32, {T * K}), pool.zeros(DType::i32, {T, K})};
  permute_plan(ctx, p, r.experts);
  const Tensor counts = pool.normal(DType::f64, {E}),
               totals = pool.zeros(DType::f64, {router_totals_size(E)});
  for (int i = 0; i < 2; ++i) router_load(ctx, counts, totals, p.offsets, r.probabilities, r.lse);
  double balance = 0, squares = 0;
  for (int64_t e = 0; e < E; ++e) {
    double sum = 0;
    for (int64_t t = 0; t < T; ++t) sum += Pool::get(r.probabilities, t * E + e);
    const auto count =
        static_cast<double>(std::count(r.experts.as<int32_t>(), r.experts.as<int32_t>() + T * K, e));
    CHECK(Pool::get(counts, e) == count);
    CHECK(Pool::get(totals, e) == 2 * count);
    CHECK(Pool::get(totals, E + e) == Approx(2 * sum));
    balance += static_cast<double>(E) * count / static_cast<double>(T * K) * sum;
  }
  for (int64_t t = 0; t < T; ++t) squares += std::pow(Pool::get(r.lse, t), 2);
  CHECK(Pool::get(totals, 2 * E) == Approx(2 * balance));
  CHECK(Pool::get(totals, 2 * E + 1) == Approx(2 * squares));
  CHECK(Pool::get(totals, 2 * E + 2) == 2 * T);
  router_load(ctx, counts, Tensor(), p.offsets, r.probabilities, r.lse);  // counts alone
  CHECK(Pool::get(counts, 0) == Pool::get(totals, 0) / 2);
}

TEST_CASE("router ops refuse wrong shapes and types by name", "[router]") {
  using Catch::Matchers::Contains;
  Context ctx(kTestScratch);
  Pool pool;
  const Tensor logits = pool.zeros(DType::f32, {4, 6});
  const Routed r = make_routed(pool, DType::f32, 4, 6, 2);
  const auto forward = [&](const Routed& to) {
    return error_of(
        [&] { route_forward(ctx, to.probabilities, to.lse, to.weights, to.experts, logits, true); });
  };
  CHECK(forward(r) == "no error");
  Routed wrong = r;
  wrong.probabilities = pool.zeros(DType::f32, {4, 5});
  CHECK_THAT(forward(wrong), Contains("route_forward: logits must be (4, 5) f32"));
  wrong = r, wrong.lse = pool.zeros(DType::f64, {4});
  CHECK_THAT(forward(wrong), Contains("route_forward: lse must be (4) f32"));
  wrong = r, wrong.experts = pool.zeros(DType::i32, {4, 7}), wrong.weights = pool.zeros(DType::f32, {4, 7});
  CHECK_THAT(forward(wrong), Contains("route_forward: "));
  const Tensor counts = pool.zeros(DType::f64, {5}), d = pool.zeros(DType::f32, {4, 6}),
               dw = pool.zeros(DType::f32, {4, 2});
  CHECK_THAT(error_of([&] {
               route_backward(ctx, d, dw, r.probabilities, r.lse, r.weights, r.experts, counts, true, {});
             }),
             Contains("route_backward: counts must be (6) f64"));
  LinearWeight w;
  w.value = pool.zeros(DType::f32, {6, 8});
  CHECK_THAT(error_of([&] {
               router_logits_forward(ctx, logits, pool.zeros(DType::f32, {4, 7}), w);
             }),
             Contains("router_logits_forward: "));
}
