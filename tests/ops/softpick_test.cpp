// Softpick: against its definition over the whole T x T matrix in f64, and against central differences. Rows
// whose scores are all negative, all positive, large and zero are among them.
#include <catch2/catch.hpp>
#include <cstring>

#include "ops/attention.h"
#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {

enum class Scores { mixed, negative, positive, large };
constexpr Scores kScores[] = {Scores::mixed, Scores::negative, Scores::positive, Scores::large};

struct Problem {
  int64_t tokens, heads, kv_heads, depth;
  Tensor q, k, v, first_key, d_o, dlse, coef0;
  double scale;

  Problem(Pool& pool, DType type, int64_t tokens_, int64_t heads_, int64_t kv_heads_, int64_t depth_,
          Scores scores, bool documents)
      : tokens(tokens_), heads(heads_), kv_heads(kv_heads_), depth(depth_) {
    scale = 1 / std::sqrt(static_cast<double>(depth));
    const double spread = scores == Scores::large ? 30 : 1;
    const DType wide = accumulate_dtype(type);
    q = exact_normal(pool, type, {tokens, heads, depth}, spread);
    k = exact_normal(pool, type, {tokens, kv_heads, depth});
    v = exact_normal(pool, type, {tokens, kv_heads, depth});
    d_o = exact_normal(pool, type, {tokens, heads, depth});
    dlse = exact_normal(pool, wide, {heads, tokens});
    coef0 = exact_normal(pool, wide, {heads, tokens});
    if (scores == Scores::negative || scores == Scores::positive) {
      // Of one sign in every channel, so that every product of a query and a key has it.
      const double sign = scores == Scores::negative ? -1 : 1;
      for (int64_t i = 0; i < q.numel(); ++i) Pool::set(q, i, std::abs(Pool::get(q, i)));
      for (int64_t i = 0; i < k.numel(); ++i) Pool::set(k, i, sign * std::abs(Pool::get(k, i)));
    }
    first_key = pool.zeros(DType::i32, {tokens});
    for (int64_t t = 0; documents && t < tokens; ++t)
      first_key.as<int32_t>()[t] = static_cast<int32_t>(t / 23 * 23);
  }
  AttentionInputs inputs() const { return {q, k, v, first_key, scale, AttentionWeights::softpick}; }
};

struct Results {
  Tensor o, lse, z0, dq, dk, dv;
  Results(Pool& pool, const Problem& p, DType type) {
    o = pool.zeros(type, {p.tokens, p.heads, p.depth});
    lse = pool.zeros(accumulate_dtype(type), {p.heads, p.tokens});
    z0 = pool.zeros(accumulate_dtype(type), {p.heads, p.tokens});
    dq = pool.zeros(type, {p.tokens, p.heads, p.depth});
    dk = pool.zeros(type, {p.tokens, p.kv_heads, p.depth});
    dv = pool.zeros(type, {p.tokens, p.kv_heads, p.depth});
  }
  void run(Context& ctx, const Problem& p) {
    attention_forward(ctx, {o, lse, z0}, p.inputs());
    attention_backward(ctx, {dq, dk, dv}, p.d_o, p.inputs(), {o, lse}, {p.dlse, p.coef0});
  }
};

void add(const Tensor& t, int64_t i, double x) { Pool::set(t, i, Pool::get(t, i) + x); }

/// The derivatives go through each numerator and the denominator by themselves, unlike those of the kernel.
void explicit_row(const Results& r, const Problem& p, int64_t t, int64_t h) {
  const int64_t g = h / (p.heads / p.kv_heads), first = p.first_key.as<int32_t>()[t], D = p.depth;
  const int64_t row = (t * p.heads + h) * D, statistic = h * p.tokens + t;
  const auto key = [&](int64_t j) { return (j * p.kv_heads + g) * D; };
  std::vector<double> z, up;  // scores, and <d_o, v_j>
  double bottom = 1e-6;
  for (int64_t j = first; j <= t; ++j) {
    double score = 0, product = 0;
    for (int64_t d = 0; d < D; ++d) {
      score += Pool::get(p.q, row + d) * Pool::get(p.k, key(j) + d);
      product += Pool::get(p.d_o, row + d) * Pool::get(p.v, key(j) + d);
    }
    z.push_back(p.scale * score), up.push_back(product);
    bottom += std::abs(std::expm1(z.back()));
  }
  double dbottom = Pool::get(p.dlse, statistic) / bottom;
  Pool::set(r.lse, statistic, std::log(bottom));
  const double top0 = std::max(std::expm1(z[0]), 0.0);
  Pool::set(r.z0, statistic, std::log(top0));
  for (size_t i = 0; i < z.size(); ++i) {
    const double top = std::max(std::expm1(z[i]), 0.0);
    dbottom -= up[i] * top / (bottom * bottom);
    for (int64_t d = 0; d < D; ++d) {
      const int64_t at = key(first + static_cast<int64_t>(i)) + d;
      add(r.o, row + d, top / bottom * Pool::get(p.v, at));
      add(r.dv, at, top / bottom * Pool::get(p.d_o, row + d));
    }
  }
  for (size_t i = 0; i < z.size(); ++i) {
    const double slope = std::exp(z[i]);
    double dtop = up[i] / bottom;
    if (i == 0 && top0 > 0) dtop += Pool::get(p.coef0, statistic) / top0;
    const double dz = (z[i] > 0 ? slope * dtop : 0) + (z[i] > 0 ? 1 : z[i] < 0 ? -1 : 0) * slope * dbottom;
    for (int64_t d = 0; d < D; ++d) {
      const int64_t at = key(first + static_cast<int64_t>(i)) + d;
      add(r.dq, row + d, p.scale * dz * Pool::get(p.k, at));
      add(r.dk, at, p.scale * dz * Pool::get(p.q, row + d));
    }
  }
}

}  // namespace

TEST_CASE("softpick equals the explicit T x T computation", "[softpick][attention]") {
  Context ctx(kTestScratch);
  for (const Scores scores : kScores)
    for (const auto& [tokens, heads, kv_heads, depth] :
         std::vector<std::array<int64_t, 4>>{{1, 2, 1, 8}, {70, 4, 2, 20}, {257, 3, 1, 64}})
      for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
        CAPTURE(static_cast<int>(scores), tokens, dtype_name(type));
        Pool pool(static_cast<uint32_t>(tokens));
        const Problem p(pool, type, tokens, heads, kv_heads, depth, scores, tokens == 70);
        Results got(pool, p, type), expected(pool, p, DType::f64);
        got.run(ctx, p);
        for (int64_t t = 0; t < tokens; ++t)
          for (int64_t h = 0; h < heads; ++h) explicit_row(expected, p, t, h);
        // Scores near 0 lose digits in e^z - 1 and e^-z, as in the authors' code; large ones in z itself.
        const double close = type == DType::f64 ? 1e-11 : type == DType::f32 ? 1e-4 : 1e-2;
        CHECK(relative_error(got.o, expected.o) <= close);
        CHECK(relative_error(got.lse, expected.lse) <= close);
        CHECK(relative_error(got.dq, expected.dq) <= close);
        CHECK(relative_error(got.dk, expected.dk) <= close);
        CHECK(relative_error(got.dv, expected.dv) <= close);
        double worst = 0;
        for (int64_t i = 0; i < got.z0.numel(); ++i) {
          // As weights: the logarithm of a numerator near 0 says little.
          const double a = std::exp(Pool::get(got.z0, i) - Pool::get(got.lse, i)),
                       b = std::exp(Pool::get(expected.z0, i) - Pool::get(expected.lse, i));
          worst = std::max(worst, std::abs(a - b));
        }
        CHECK(worst <= close);
        if (scores == Scores::negative)  // no key has a weight
          for (int64_t i = 0; i < got.o.numel(); ++i) REQUIRE(Pool::get(got.o, i) == 0);
      }
}

TEST_CASE("softpick gradients equal central differences, with those of lse and z0", "[softpick][attention]") {
  Context ctx(kTestScratch);
  for (const Scores scores : {Scores::mixed, Scores::negative, Scores::positive}) {
    CAPTURE(static_cast<int>(scores));
    Pool pool(3);
    const Problem p(pool, DType::f64, 30, 4, 2, 6, scores, true);
    Results r(pool, p, DType::f64);
    // <d_o, o> + <dlse, lse> + <coef0, z0>, where z0 is finite
    const auto loss = [&] {
      attention_forward(ctx, {r.o, r.lse, r.z0}, p.inputs());
      double sum = dot(p.d_o, r.o) + dot(p.dlse, r.lse);
      for (int64_t i = 0; i < r.z0.numel(); ++i)
        if (const double z0 = Pool::get(r.z0, i); std::isfinite(z0)) sum += Pool::get(p.coef0, i) * z0;
      return sum;
    };
    loss();
    for (int64_t i = 0; i < r.z0.numel(); ++i)
      if (!std::isfinite(Pool::get(r.z0, i))) Pool::set(p.coef0, i, 7);  // which nothing may read
    r.run(ctx, p);
    // The kinks at a score of 0 are narrow: steps are small.
    CHECK(gradient_error(p.q, r.dq, loss, 40, 1e-6) < 1e-6);
    CHECK(gradient_error(p.k, r.dk, loss, 40, 1e-6) < 1e-6);
    if (scores != Scores::negative) CHECK(gradient_error(p.v, r.dv, loss, 40, 1e-6) < 1e-6);
  }
}

TEST_CASE("softpick gives the same bits for any number of threads, and reads no masked key",
          "[softpick][attention]") {
  for (const bool documents : {false, true}) {
    Pool pool(5);
    const Problem p(pool, DType::f32, 400, 4, 2, 32, Scores::mixed, documents);
    Context ctx(kTestScratch);
    Results one(pool, p, DType::f32), many(pool, p, DType::f32);
    {
      const Threads threads(1);
      one.run(ctx, p);
    }
    {
      const Threads threads(3);
      many.run(ctx, p);
    }
    CHECK((same_bits(one.o, many.o) && same_bits(one.lse, many.lse) && same_bits(one.z0, many.z0)));
    CHECK((same_bits(one.dq, many.dq) && same_bits(one.dk, many.dk) && same_bits(one.dv, many.dv)));
    if (!documents) continue;
    // A later document's keys change nothing in the ones before it.
    for (int64_t i = 0; i < 2 * 32; ++i) Pool::set(p.k, 230 * 2 * 32 + i, 50);
    many.run(ctx, p);
    CHECK(same_bits(one.o.rows(0, 230), many.o.rows(0, 230)));
    CHECK(same_bits(one.dq.rows(0, 230), many.dq.rows(0, 230)));
    CHECK(!same_bits(one.o, many.o));
  }
}

TEST_CASE("softpick with earlier keys equals the last rows of the full computation",
          "[softpick][attention]") {
  Context ctx(kTestScratch);
  Pool pool(11);
  const Problem p(pool, DType::f64, 150, 4, 2, 16, Scores::mixed, false);
  Results whole(pool, p, DType::f64);
  attention_forward(ctx, {whole.o, whole.lse, whole.z0}, p.inputs());
  AttentionInputs tail = p.inputs();
  tail.q = p.q.rows(140, 10), tail.first_key = p.first_key.rows(140, 10);
  const Tensor o = pool.zeros(DType::f64, {10, 4, 16}), lse = pool.zeros(DType::f64, {4, 10});
  attention_forward(ctx, {o, lse, {}}, tail);
  CHECK(relative_error(o, whole.o.rows(140, 10)) < 1e-13);
}
