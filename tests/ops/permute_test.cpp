// The plan is a stable sort of slots by expert; unpermute sums the returned rows.
#include "ops/permute.h"

#include <numeric>

#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {

Permutation permutation_of(Pool& pool, int64_t tokens, int64_t per_token, int64_t experts) {
  return {.offsets = pool.zeros(DType::i32, {experts + 1}),
          .slots = pool.zeros(DType::i32, {tokens * per_token}),
          .tokens = pool.zeros(DType::i32, {tokens * per_token}),
          .rows = pool.zeros(DType::i32, {tokens, per_token})};
}

/// K different experts for each token.
Tensor choices(Pool& pool, int64_t tokens, int64_t per_token, int64_t experts) {
  const Tensor chosen = pool.zeros(DType::i32, {tokens, per_token}),
               draw = pool.integers({tokens}, 0, 1 << 20);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = 0; k < per_token; ++k)
      chosen.as<int32_t>()[t * per_token + k] =
          static_cast<int32_t>((draw.as<int32_t>()[t] + 3 * k) % experts);
  return chosen;
}

}  // namespace

TEST_CASE("a permutation plan is a stable sort of slots by expert", "[permute]") {
  Context ctx(kTestScratch);
  for (const auto& [T, K, E] :
       std::vector<std::array<int64_t, 3>>{{1, 1, 1}, {1, 2, 5}, {17, 2, 7}, {40, 5, 5}, {301, 8, 64}}) {
    CAPTURE(T, K, E);
    Pool pool;
    const Tensor experts = choices(pool, T, K, E);
    const Permutation p = permutation_of(pool, T, K, E);
    permute_plan(ctx, p, experts);

    std::vector<int32_t> sorted(static_cast<size_t>(T * K));
    std::iota(sorted.begin(), sorted.end(), 0);
    const int32_t* expert = experts.as<int32_t>();
    std::stable_sort(sorted.begin(), sorted.end(),
                     [&](int32_t a, int32_t b) { return expert[a] < expert[b]; });
    for (int64_t r = 0; r < T * K; ++r) {
      const int32_t slot = sorted[static_cast<size_t>(r)];
      REQUIRE(p.slots.as<int32_t>()[r] == slot);
      REQUIRE(p.tokens.as<int32_t>()[r] == slot / K);
      REQUIRE(p.rows.as<int32_t>()[slot] == r);
    }
    CHECK(p.offsets.as<int32_t>()[0] == 0);
    for (int64_t e = 0; e < E; ++e)
      CHECK(p.offsets.as<int32_t>()[e + 1] - p.offsets.as<int32_t>()[e] ==
            std::count(expert, expert + T * K, e));
  }
}

TEST_CASE("a plan with all tokens at one expert leaves the others without rows", "[permute]") {
  Context ctx(kTestScratch);
  Pool pool;
  const Tensor experts = pool.integers({6, 1}, 2, 2);
  const Permutation p = permutation_of(pool, 6, 1, 4);
  permute_plan(ctx, p, experts);
  const int32_t expected[] = {0, 0, 0, 6, 6};
  for (int64_t e = 0; e < 5; ++e) CHECK(p.offsets.as<int32_t>()[e] == expected[e]);
  for (int32_t r = 0; r < 6; ++r) CHECK(p.slots.as<int32_t>()[r] == r);
}

TEST_CASE("unpermute agrees over types and threads", "[permute]") {
  for (const auto& [T, K, C] :
       std::vector<std::array<int64_t, 3>>{{1, 1, 1}, {5, 2, 17}, {40, 3, 300}, {65, 8, 128}})
    for (const Into into : {Into::overwrite, Into::add}) {
      CAPTURE(T, K, C);
      check_op([&, tokens = T, per_token = K, columns = C](Pool& pool, Context& ctx, DType type) {
        const Tensor x = exact_normal(pool, type, {tokens * per_token, columns});
        const Tensor y = exact_normal(pool, type, {tokens, columns});
        const Permutation p = permutation_of(pool, tokens, per_token, 9);
        Context plan(kTestScratch);
        permute_plan(plan, p, choices(pool, tokens, per_token, 9));
        unpermute(ctx, y, x, p.rows, into);
        return std::vector{y};
      });
    }
}

TEST_CASE("unpermute sums a token's rows, and gathering is its gradient", "[permute]") {
  Context ctx(kTestScratch);
  Pool pool;
  const int64_t T = 6, K = 3, C = 5;
  const Tensor x = pool.normal(DType::f64, {T * K, C}), y = pool.zeros(DType::f64, {T, C}),
               dy = pool.normal(DType::f64, {T, C});
  const Permutation p = permutation_of(pool, T, K, 7);
  permute_plan(ctx, p, choices(pool, T, K, 7));
  const auto loss = [&] {
    unpermute(ctx, y, x, p.rows, Into::overwrite);
    return dot(dy, y);
  };
  loss();
  for (int64_t t = 0; t < T; ++t)
    for (int64_t c = 0; c < C; ++c) {
      double s = 0;
      for (int64_t k = 0; k < K; ++k) s += Pool::get(x, p.rows.as<int32_t>()[t * K + k] * C + c);
      CHECK(Pool::get(y, t * C + c) == Approx(s).epsilon(1e-14));
    }
  const Tensor dx = pool.zeros(DType::f64, {T * K, C});
  for (int64_t i = 0; i < dx.numel(); ++i)
    Pool::set(dx, i, Pool::get(dy, p.tokens.as<int32_t>()[i / C] * C + i % C));
  CHECK(gradient_error(x, dx, loss) <= kGradientTolerance);
}

TEST_CASE("bf16 rows are summed in f32 and rounded once", "[permute]") {
  Context ctx(kTestScratch);
  Pool pool;
  const Tensor x = pool.zeros(DType::bf16, {3, 1}), y = pool.zeros(DType::bf16, {1, 1}),
               rows = pool.zeros(DType::i32, {1, 3});
  for (int64_t i = 0; i < 3; ++i) rows.as<int32_t>()[i] = static_cast<int32_t>(i);
  Pool::set(x, 0, 256), Pool::set(x, 1, 1), Pool::set(x, 2, 1);  // 256 + 1 is 256 in bf16
  unpermute(ctx, y, x, rows, Into::overwrite);
  CHECK(Pool::get(y, 0) == 258);
}

TEST_CASE("permute ops refuse wrong shapes and invalid experts, by name", "[permute]") {
  using Catch::Matchers::Contains;
  Context ctx(kTestScratch);
  Pool pool;
  const Permutation p = permutation_of(pool, 4, 2, 3);
  const Tensor experts = pool.zeros(DType::i32, {4, 2});
  experts.as<int32_t>()[5] = 3;
  CHECK_THAT(error_of([&] { permute_plan(ctx, p, experts); }), Contains("permute_plan: expert 3 of 3"));
  CHECK_THAT(error_of([&] {
               permute_plan(ctx, p, pool.zeros(DType::i32, {5, 2}));
             }),
             Contains("permute_plan: "));
  const Tensor x = pool.zeros(DType::f32, {8, 6}), y = pool.zeros(DType::f32, {3, 6});
  CHECK_THAT(error_of([&] { unpermute(ctx, y, x, p.rows, Into::overwrite); }), Contains("unpermute: "));
}
