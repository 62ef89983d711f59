// The indexer: its choice against sorting, its loss against the definition and central differences.
#include "ops/indexer.h"

#include <algorithm>
#include <numeric>

#include "ops/attention.h"
#include "ops/op_support.h"
#include "ops/some_queries.h"
#include "support/enums.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Shape {
  int64_t tokens, heads, depth, sets = 1, block = 1, documents = 1;
  IndexActivation activation = IndexActivation::sigmoid;
  IndexHeadWeights weights = IndexHeadWeights::sigmoid;
  bool bias = true;
};

/// An indexer with random inputs, and the definition of its scores.
struct Case {
  Shape s;
  Tensor q, k, keys, w, bias, w_bias, first_key;

  Case(Pool& pool, const Shape& shape, DType dtype = DType::f64) : s(shape) {
    q = exact_normal(pool, dtype, {s.tokens, s.heads, s.depth});
    keys = k = exact_normal(pool, dtype, {s.tokens, s.depth});
    if (s.weights != IndexHeadWeights::none) w = exact_normal(pool, dtype, {s.tokens, s.heads});
    if (s.bias) bias = exact_normal(pool, dtype, {s.heads});
    if (s.bias && w) w_bias = exact_normal(pool, dtype, {s.heads});
    first_key = pool.zeros(DType::i32, {s.tokens});
    const int64_t length = (s.tokens + s.documents - 1) / s.documents;
    for (int64_t t = 0; t < s.tokens; ++t)
      first_key.as<int32_t>()[t] = static_cast<int32_t>(t / length * length);
  }
  void pool_keys(Pool& pool, Context& ctx) {
    if (s.block == 1) return;
    k = pool.zeros(keys.dtype, {s.tokens, s.depth});
    block_means(ctx, k, keys, first_key, s.block);
  }
  IndexInputs inputs() const {
    return {.q = q,
            .k = k,
            .w = w,
            .bias = bias,
            .w_bias = w_bias,
            .first_key = first_key,
            .scale = 0.6,
            .sets = s.sets,
            .block = s.block,
            .activation = s.activation,
            .head_weights = s.weights};
  }
  int64_t first(int64_t t) const { return first_key.as<int32_t>()[t]; }
  int64_t candidates(int64_t t) const { return s.block == 1 ? t - first(t) + 1 : (t - first(t)) / s.block; }
  /// I of query t and its c-th candidate.
  double score(int64_t set, int64_t t, int64_t c) const {
    double sum = 0;
    for (int64_t j = set * s.heads / s.sets; j < (set + 1) * s.heads / s.sets; ++j) {
      double u = 0, a = 1;
      for (int64_t d = 0; d < s.depth; ++d) {
        double key = 0;
        for (int64_t b = 0; b < s.block; ++b)
          key += Pool::get(keys, (first(t) + c * s.block + b) * s.depth + d) / static_cast<double>(s.block);
        u += 0.6 * Pool::get(q, (t * s.heads + j) * s.depth + d) * key;
      }
      if (bias) u += Pool::get(bias, j);
      if (w) a = Pool::get(w, t * s.heads + j) + (w_bias ? Pool::get(w_bias, j) : 0);
      if (s.weights == IndexHeadWeights::sigmoid) a = 1 / (1 + std::exp(-a));
      sum += a * (s.activation == IndexActivation::sigmoid ? 1 / (1 + std::exp(-u)) : std::max(u, 0.0));
    }
    return sum;
  }
  Selection selection(Pool& pool, const Budget& budget) const {
    return {
        .first = pool.zeros(DType::i32, {s.sets, s.tokens, selection_room(budget.most(), s.tokens, s.block)}),
        .count = pool.zeros(DType::i32, {s.sets, s.tokens}),
        .first_key = first_key,
        .block = s.block};
  }
};

std::vector<int64_t> chosen(const Selection& s, int64_t set, int64_t t) {
  const int64_t row = set * s.count.dim(1) + t;
  const int32_t* const first = s.first.as<int32_t>() + row * s.first.dim(2);
  return {first, first + s.count.as<int32_t>()[row]};
}

/// The k candidates with the largest scores, ties to the last, by sorting; with the query's own block.
std::vector<int64_t> by_sorting(const Case& c, int64_t set, int64_t t, int64_t k, bool force_self) {
  std::vector<std::pair<double, int64_t>> order;
  for (int64_t i = 0; i < c.candidates(t); ++i) order.emplace_back(c.score(set, t, i), i);
  if (force_self && c.s.block == 1) order.back().first = INFINITY;
  std::sort(order.rbegin(), order.rend());
  std::vector<int64_t> out;
  for (int64_t i = 0; i < std::min<int64_t>(k, std::ssize(order)); ++i)
    out.push_back(c.first(t) + order[static_cast<size_t>(i)].second * c.s.block);
  if (c.s.block > 1) out.push_back(c.first(t) + c.candidates(t) * c.s.block);
  std::sort(out.begin(), out.end());
  return out;
}

/// Calls f for every activation and kind of head weights.
template <class F>
void for_each_kind(F&& f) {
  for_each_value<IndexActivation>([&](IndexActivation activation) {
    for_each_value<IndexHeadWeights>([&](IndexHeadWeights weights) { f(activation, weights); });
  });
}

const Budget kFive = {.policy = BudgetPolicy::fixed, .base = 5, .min = 1, .max = 5};

}  // namespace

TEST_CASE("selection is that of sorting, for every kind of score, block and document", "[indexer]") {
  Context ctx(kTestScratch);
  for_each_kind([&](IndexActivation activation, IndexHeadWeights weights) {
    for (const int64_t block : {1, 3})
      for (const bool force_self : {false, true}) {
        Pool pool(21);
        Case c(pool, {.tokens = 331,
                      .heads = 4,
                      .depth = 10,
                      .sets = 2,
                      .block = block,
                      .documents = 2,
                      .activation = activation,
                      .weights = weights,
                      .bias = force_self});
        c.pool_keys(pool, ctx);
        Budget budget = kFive;
        budget.force_self = force_self;
        const Selection s = c.selection(pool, budget);
        select_keys(ctx, s, c.inputs(), budget, {}, {}, "a layer");
        int wrong = 0;
        for (int64_t set = 0; set < 2; ++set)
          for (int64_t t = 0; t < 331; ++t)
            wrong += chosen(s, set, t) != by_sorting(c, set, t, 5, force_self);
        CHECK(wrong == 0);
      }
  });
}

TEST_CASE("selection: ties go to the last key, exactly, at any k", "[indexer]") {
  Context ctx(kTestScratch);
  Pool pool(22);
  for (const DType type : kFloatingTypes) {
    Case c(pool,
           {.tokens = 300,
            .heads = 1,
            .depth = 4,
            .activation = IndexActivation::relu,
            .weights = IndexHeadWeights::none,
            .bias = false},
           type);
    // Three values of scores alone, many times each; 0 and -0 are equal.
    for (int64_t i = 0; i < c.q.numel(); ++i) Pool::set(c.q, i, i % 4 == 0 ? 1 : 0);
    for (int64_t i = 0; i < c.k.numel(); ++i)
      Pool::set(c.k, i, i % 4 == 0 ? static_cast<double>(i / 4 % 3) - 1 : -0.0);
    for (const int64_t k : {1, 2, 7, 64, 150, 299, 300, 400}) {
      const Budget budget = {.base = k, .max = k};
      const Selection s = c.selection(pool, budget);
      select_keys(ctx, s, c.inputs(), budget, {}, {}, "a layer");
      int wrong = 0;
      for (int64_t t = 0; t < 300; ++t) wrong += chosen(s, 0, t) != by_sorting(c, 0, t, k, false);
      CHECK(wrong == 0);
    }
  }
}

namespace {

/// Every query gives key s the score 0.6 value(s), or 0 if that is negative.
template <class F>
Case case_with_scores(Pool& pool, int64_t tokens, DType type, F&& value) {
  Case c(pool,
         {.tokens = tokens,
          .heads = 1,
          .depth = 4,
          .activation = IndexActivation::relu,
          .weights = IndexHeadWeights::none,
          .bias = false},
         type);
  for (int64_t i = 0; i < c.q.numel(); ++i) Pool::set(c.q, i, i % 4 == 0 ? 1 : 0);
  for (int64_t i = 0; i < c.k.numel(); ++i) Pool::set(c.k, i, i % 4 == 0 ? value(i / 4) : 0);
  return c;
}

/// Values between 1 and 1.4, and this one of key 50.
Case case_with_outlier(Pool& pool, int64_t tokens, double outlier) {
  return case_with_scores(pool, tokens, DType::f32,
                          [=](int64_t s) { return s == 50 ? outlier : 1 + s * 28 % 101 / 256.0; });
}

}  // namespace

TEST_CASE("selection among so many scores that a sample bounds them, even if it misleads", "[indexer]") {
  // Of up to 1,400 scores every tenth or so is looked at, and of some of these cases all of those are high.
  const auto mixed = [](int64_t s) { return 1 + s * 7919 % 1009 / 1024.0; };
  for (const DType type : kFloatingTypes)
    for (const int misled : {0, 1, 2}) {
      Context ctx(kTestScratch);
      Pool pool(27);
      const Case c = case_with_scores(pool, 1400, type, [&](int64_t s) {
        return mixed(s) + (misled == 1 && s % 10 == 0 ? 4 : misled == 2 && s % 10 == 1 ? -4 : 0);
      });
      for (const int64_t k : {1, 60, 200, 1300}) {
        const Budget budget = {.base = k, .max = k};
        const Selection s = c.selection(pool, budget);
        select_keys(ctx, s, c.inputs(), budget, {}, {}, "a layer");
        int wrong = 0;
        for (int64_t t = 0; t < 1400; t += 9) wrong += chosen(s, 0, t) != by_sorting(c, 0, t, k, false);
        INFO(dtype_name(type) << ", misled " << misled << ", k " << k);
        CHECK(wrong == 0);
      }
    }
}

TEST_CASE("selection: a score without bound has an infinite variance, which the mean leaves out",
          "[indexer]") {
  Context ctx(kTestScratch);
  for (const BudgetPolicy policy :
       {BudgetPolicy::eq8, BudgetPolicy::inverse, BudgetPolicy::code, BudgetPolicy::entropy})
    for (const bool force_self : {false, true}) {
      Pool pool(26);
      const Case c = case_with_outlier(pool, 100, INFINITY);
      const Budget budget = {
          .policy = policy, .base = 8, .min = 3, .max = 30, .temperature = 1, .force_self = force_self};
      const Selection s = c.selection(pool, budget);
      const Tensor mean = pool.zeros(DType::f64, {1}), sums = pool.zeros(DType::f64, {kIndexSums});
      Pool::set(mean, 0, 0.01);
      select_keys(ctx, s, c.inputs(), budget, mean, sums, "a layer");
      // V / m is infinite, or the entropy 0.
      const int64_t k = policy == BudgetPolicy::eq8 ? 30 : policy == BudgetPolicy::inverse ? 3 : 4;
      INFO("policy " << static_cast<int>(policy) << ", force_self " << force_self);
      int wrong = 0;
      for (int64_t t = 50; t < 100; ++t) wrong += chosen(s, 0, t) != by_sorting(c, 0, t, k, force_self);
      CHECK(wrong == 0);
      CHECK(std::isfinite(Pool::get(sums, kIndexVariance)));
      CHECK(Pool::get(sums, kIndexQueries) == 100);
    }
}

TEST_CASE("selection: one score far above the others, or without bound, leaves their order", "[indexer]") {
  Context ctx(kTestScratch);
  for (const double outlier : {1e30, static_cast<double>(INFINITY)})
    for (const bool force_self : {false, true}) {
      Pool pool(26);
      const Case c = case_with_outlier(pool, 400, outlier);
      for (const int64_t k : {1, 2, 30, 250}) {
        const Budget budget = {.base = k, .max = k, .force_self = force_self};
        const Selection s = c.selection(pool, budget);
        select_keys(ctx, s, c.inputs(), budget, {}, {}, "a layer");
        int wrong = 0;
        for (int64_t t = 0; t < 400; ++t) wrong += chosen(s, 0, t) != by_sorting(c, 0, t, k, force_self);
        CHECK(wrong == 0);
      }
    }
}

TEST_CASE("selection does not depend on the number of threads", "[indexer]") {
  std::vector<std::vector<int32_t>> found;
  for (const int threads : {1, 2, 3}) {
    const Threads scope(threads);
    Context ctx(kTestScratch);
    Pool pool(23);
    const Case c(pool, {.tokens = 400, .heads = 2, .depth = 16}, DType::f32);
    const Selection s = c.selection(pool, kFive);
    select_keys(ctx, s, c.inputs(), kFive, {}, {}, "a layer");
    found.emplace_back(s.first.as<int32_t>(), s.first.as<int32_t>() + s.first.numel());
  }
  CHECK(found[0] == found[1]);
  CHECK(found[0] == found[2]);
}

TEST_CASE("the last queries choose as they do among many, on any number of threads", "[indexer]") {
  // As in decoding: 16,400 keys are enough for several threads to share the candidates of one query.
  constexpr int64_t kTokens = 16400;
  for_each_kind([&](IndexActivation activation, IndexHeadWeights weights) {
    for (const int64_t block : {1, 3}) {
      Context ctx(int64_t{1} << 26);
      Pool pool(24);
      Case c(pool, {.tokens = kTokens,
                    .heads = 4,
                    .depth = 18,
                    .sets = block == 1 ? 1 : 2,
                    .block = block,
                    .documents = 2,
                    .activation = activation,
                    .weights = weights});
      c.pool_keys(pool, ctx);
      const auto of_last = [&](int64_t queries) {
        const auto last = [&](const Tensor& t) { return t ? t.rows(kTokens - queries, queries) : Tensor(); };
        IndexInputs in = c.inputs();
        in.q = last(in.q), in.w = last(in.w), in.first_key = last(in.first_key);
        const Selection s = {
            .first = pool.zeros(DType::i32, {c.s.sets, queries, selection_room(5, kTokens, block)}),
            .count = pool.zeros(DType::i32, {c.s.sets, queries}),
            .first_key = in.first_key,
            .block = block};
        select_keys(ctx, s, in, kFive, {}, {}, "a layer");
        return s;
      };
      const Selection many = of_last(32);
      for (const int threads : {1, 2, 5})
        for (const int64_t queries : {1, 2, 7}) {
          const Threads scope(threads);
          const Selection few = of_last(queries);
          for (int64_t set = 0; set < c.s.sets; ++set)
            for (int64_t t = 0; t < queries; ++t)
              CHECK(chosen(few, set, t) == chosen(many, set, 32 - queries + t));
        }
    }
  });
}

TEST_CASE("k of every policy follows its formula, within its bounds", "[indexer]") {
  Context ctx(kTestScratch);
  for_each_value<BudgetPolicy>([&](BudgetPolicy policy) {
    for (const double mean : {0.0, 0.02}) {
      Pool pool(24);
      const Case c(pool, {.tokens = 90, .heads = 2, .depth = 8, .documents = 2});
      const Budget budget = {.policy = policy, .base = 11, .min = 4, .max = 30, .temperature = 0.7};
      const Selection s = c.selection(pool, budget);
      const Tensor mean_variance = pool.zeros(DType::f64, {1}), sums = pool.zeros(DType::f64, {kIndexSums});
      Pool::set(mean_variance, 0, mean);
      select_keys(ctx, s, c.inputs(), budget, mean_variance, sums, "a layer");
      double variances = 0, total = 0;
      int64_t wrong = 0, bounded = 0;
      for (int64_t t = 0; t < 90; ++t) {
        const int64_t n = c.candidates(t);
        std::vector<double> x;
        for (int64_t i = 0; i < n; ++i) x.push_back(c.score(0, t, i));
        const double m = std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(n);
        double variance = 0, z = 0, entropy = 0;
        for (const double y : x) variance += (y - m) * (y - m) / static_cast<double>(n), z += std::exp(y);
        for (const double y : x) entropy -= std::exp(y) / z * std::log(std::exp(y) / z);
        double k = 11;
        if (policy == BudgetPolicy::eq8 && mean > 0) k = 11 * variance / mean;
        if (policy == BudgetPolicy::inverse && mean > 0) k = 11 * mean / variance;
        if (policy == BudgetPolicy::code && mean > 0) k = 11 * (0.5 + 1 / (1 + 0.7 * variance / mean));
        if (policy == BudgetPolicy::entropy)
          k = 11 * (0.5 + 0.7 * entropy / std::log(static_cast<double>(n) + 1));
        if (policy != BudgetPolicy::fixed)
          bounded += k < 4 || k > 30, k = std::clamp(std::floor(k), 4.0, 30.0);
        const auto expected = std::min(static_cast<int64_t>(k), n);
        wrong += std::ssize(chosen(s, 0, t)) != expected;
        if (budget.needs_variance()) variances += variance;
        total += static_cast<double>(expected);
      }
      INFO("policy " << static_cast<int>(policy) << ", mean " << mean);
      CHECK(wrong == 0);
      CHECK(Pool::get(sums, kIndexSelected) == total);
      CHECK(Pool::get(sums, kIndexQueries) == 90);
      CHECK(Pool::get(sums, kIndexVariance) == Approx(variances).epsilon(1e-12));
      if (policy == BudgetPolicy::inverse && mean > 0) CHECK(bounded > 5);
    }
  });
}

TEST_CASE("one token, k above the length, and a score that is not a number", "[indexer]") {
  Context ctx(kTestScratch);
  Pool pool(25);
  const Case one(pool, {.tokens = 1, .heads = 2, .depth = 4});
  const Selection s = one.selection(pool, kFive);
  select_keys(ctx, s, one.inputs(), kFive, {}, {}, "a layer");
  CHECK(chosen(s, 0, 0) == std::vector<int64_t>{0});
  for_each_kind([&](IndexActivation activation, IndexHeadWeights weights) {
    const Case c(pool, {.tokens = 40, .heads = 2, .depth = 4, .activation = activation, .weights = weights});
    Pool::set(c.k, 7, NAN);
    const Selection bad = c.selection(pool, kFive);
    CHECK(error_of([&] { select_keys(ctx, bad, c.inputs(), kFive, {}, {}, "model.layers.3.self_attn"); }) ==
          "model.layers.3.self_attn: a score of the indexer is not a number");
  });
}

TEST_CASE("means of blocks and their gradient, documents of any length", "[indexer]") {
  Context ctx(kTestScratch);
  Pool pool(26);
  const Case c(pool, {.tokens = 47, .heads = 1, .depth = 5, .documents = 3});
  const Tensor y = pool.normal(DType::f64, {47, 5}), dx = pool.normal(DType::f64, {47, 5}),
               dy = pool.normal(DType::f64, {47, 5});
  const auto loss = [&] {
    block_means(ctx, y, c.keys, c.first_key, 4);
    return dot(dy, y);
  };
  loss();
  block_means_backward(ctx, dx, dy, c.first_key, 4);
  CHECK(gradient_error(c.keys, dx, loss) < 1e-10);
  double mean = 0;
  for (int64_t i = 0; i < 4; ++i) mean += Pool::get(c.keys, (16 + 4 + i) * 5 + 2) / 4;
  CHECK(Pool::get(y, 20 * 5 + 2) == Approx(mean));
  CHECK(Pool::get(y, 21 * 5 + 2) == 0);
}

TEST_CASE("a selection contains the tokens of its blocks and no others", "[indexer]") {
  Context ctx(kTestScratch);
  Pool pool(28);
  Case c(pool, {.tokens = 61, .heads = 2, .depth = 5, .sets = 2, .block = 4, .documents = 2});
  c.pool_keys(pool, ctx);
  const Selection s = c.selection(pool, kFive);
  select_keys(ctx, s, c.inputs(), kFive, {}, {}, "a layer");
  int wrong = 0, inside = 0;
  for (int64_t set = 0; set < 2; ++set)
    for (int64_t t = 0; t < 61; ++t) {
      const std::vector<int64_t> blocks = chosen(s, set, t);
      for (int64_t j = c.first(t); j <= t; ++j) {
        bool expected = false;
        for (const int64_t first : blocks) expected |= j >= first && j < first + 4;
        wrong += s.contains(set, t, j) != expected, inside += expected;
      }
    }
  CHECK(wrong == 0);
  CHECK(inside > 1000);
}

namespace {

/// Attention of 4 query heads on 2 key/value heads beside an indexer, its loss, and its gradients.
struct Loss {
  Case c;
  Tensor q, k, v, o, lse, targets, sums, dq, dk, dw, dbias, dw_bias, log_temperature, dlog_temperature;
  double scale = 0.125;  // gradient_scale
  std::optional<Selection> selection;
  static constexpr double kAttention = 0.8, kCoefficient = 1.7;

  Loss(Pool& pool, Context& ctx, const Shape& shape, bool all, bool learned, DType type = DType::f64)
      : c(pool, shape, type) {
    const DType wide = accumulate_dtype(type);
    const int64_t T = shape.tokens, J = shape.heads;
    q = exact_normal(pool, type, {T, 4, 6});
    k = exact_normal(pool, type, {T, 2, 6});
    v = exact_normal(pool, type, {T, 2, 6});
    o = pool.zeros(type, {T, 4, 6});
    lse = pool.zeros(wide, {4, T});
    targets = pool.zeros(DType::i32, {T});
    for (int64_t t = 0; t < T; ++t) targets.as<int32_t>()[t] = t % 5 == 3 ? -1 : 1;
    sums = pool.zeros(DType::f64, {kIndexSums});
    dq = pool.normal(type, {T, J, shape.depth});
    dk = pool.normal(type, {T, shape.depth});
    if (c.w) dw = pool.normal(type, {T, J});
    if (c.bias) dbias = pool.zeros(wide, {J});
    if (c.w_bias) dw_bias = pool.zeros(wide, {J});
    if (learned) {
      log_temperature = exact_normal(pool, type, {1});
      dlog_temperature = pool.zeros(wide, {1});
    }
    c.pool_keys(pool, ctx);
    attention_forward(ctx, {.o = o, .lse = lse},
                      {.q = q, .k = k, .v = v, .first_key = c.first_key, .scale = kAttention});
    if (all) return;
    selection = c.selection(pool, kFive);
    select_keys(ctx, *selection, c.inputs(), kFive, {}, {}, "a layer");
  }
  void run(Context& ctx) {
    index_loss(ctx,
               {.dq = dq,
                .dk = dk,
                .dw = dw,
                .dbias = dbias,
                .dw_bias = dw_bias,
                .dlog_temperature = dlog_temperature},
               sums, c.inputs(), {.q = q, .k = k, .lse = lse, .scale = kAttention, .targets = targets},
               selection ? &*selection : nullptr,
               {.coefficient = kCoefficient,
                .temperature = 1.3,
                .log_temperature = log_temperature,
                .gradient_scale = scalar(scale)});
  }
  /// By its definition.
  double value() const {
    const double tau = log_temperature ? std::exp(Pool::get(log_temperature, 0)) : 1.3;
    const int64_t per_set = 4 / c.s.sets, b = c.s.block;
    double sum = 0;
    for (int64_t set = 0; set < c.s.sets; ++set)
      for (int64_t t = 0; t < c.s.tokens; ++t) {
        if (targets.as<int32_t>()[t] < 0) continue;
        std::vector<int64_t> blocks;
        for (int64_t i = 0; i < c.candidates(t); ++i) blocks.push_back(i);
        if (selection) {
          blocks = chosen(*selection, set, t);
          if (b > 1) blocks.pop_back();
          for (int64_t& i : blocks) i = (i - c.first(t)) / b;
        }
        std::vector<double> p, x;
        double mass = 0, z = 0;
        for (const int64_t i : blocks) {
          p.push_back(0);
          for (int64_t j = c.first(t) + i * b; j < c.first(t) + i * b + b; ++j)
            for (int64_t h = set * per_set; h < (set + 1) * per_set; ++h) {
              double dot = 0;
              for (int64_t d = 0; d < 6; ++d)
                dot += Pool::get(q, (t * 4 + h) * 6 + d) * Pool::get(k, (j * 2 + h / 2) * 6 + d);
              p.back() += std::exp(kAttention * dot - Pool::get(lse, h * c.s.tokens + t));
            }
          mass += p.back();
          x.push_back(tau * c.score(set, t, i));
          z += std::exp(x.back());
        }
        for (size_t i = 0; i < p.size(); ++i)
          sum += p[i] / mass * (std::log(p[i] / mass) - x[i] + std::log(z));
      }
    return sum;
  }
};

}  // namespace

TEST_CASE("the indexer's loss: value by definition, gradients by central differences", "[indexer]") {
  Context ctx(kTestScratch);
  int turn = 0;
  for_each_kind([&](IndexActivation activation, IndexHeadWeights weights) {
    for (const int64_t block : {1, 3})
      for (const bool all : {false, true}) {
        const bool learned = ++turn % 2 == 0, bias = turn % 3 != 0;
        INFO("block " << block << ", all " << all << ", activation " << static_cast<int>(activation));
        Pool pool(27);
        Loss l(pool, ctx,
               {.tokens = 41,
                .heads = 4,
                .depth = 6,
                .sets = 1 + turn / 2 % 2,
                .block = block,
                .documents = 2,
                .activation = activation,
                .weights = weights,
                .bias = bias},
               all, learned);
        l.run(ctx);
        CHECK(Pool::get(l.sums, kIndexLoss) == Approx(l.value()).epsilon(1e-11));
        CHECK(l.value() > 1);
        CHECK(Pool::get(l.sums, kIndexCounted) == static_cast<double>(33 * l.c.s.sets));
        // The selection is held fixed; relu's slope jumps, so the steps are small there.
        const auto loss = [&] { return Loss::kCoefficient * l.scale * l.value(); };
        const double step = activation == IndexActivation::relu ? 1e-7 : 1e-5,
                     most = step < 1e-6 ? 1e-6 : 1e-7;
        CHECK(gradient_error(l.c.q, l.dq, loss, 25, step) < most);
        const Tensor dk = pool.zeros(DType::f64, {41, 6});
        if (block > 1) block_means_backward(ctx, dk, l.dk, l.c.first_key, block);
        CHECK(gradient_error(l.c.keys, block > 1 ? dk : l.dk, loss, 25, step) < most);
        if (l.c.w) CHECK(gradient_error(l.c.w, l.dw, loss, 25, step) < most);
        if (l.c.bias) CHECK(gradient_error(l.c.bias, l.dbias, loss, 25, step) < most);
        if (l.c.w_bias) CHECK(gradient_error(l.c.w_bias, l.dw_bias, loss, 25, step) < most);
        if (learned) CHECK(gradient_error(l.log_temperature, l.dlog_temperature, loss, 1, step) < most);
      }
  });
}

TEST_CASE("the indexer's loss: types agree, and threads do not change a bit", "[indexer]") {
  for (const bool all : {false, true})
    check_op([&](Pool& pool, Context& ctx, DType type) {
      // The same set for all types.
      Loss l(pool, ctx, {.tokens = 280, .heads = 2, .depth = 8, .documents = 2}, true, true, type);
      Selection s = l.c.selection(pool, {.base = 60, .max = 60});
      for (int64_t t = 0; t < 280; ++t) {
        const auto n = static_cast<int32_t>(std::min<int64_t>(l.c.candidates(t), 60));
        s.count.as<int32_t>()[t] = n;
        for (int32_t i = 0; i < n; ++i)
          s.first.as<int32_t>()[t * s.first.dim(2) + i] =
              static_cast<int32_t>(l.c.first(t)) + i * static_cast<int32_t>(l.c.candidates(t) / n);
      }
      if (!all) l.selection = s;
      l.run(ctx);
      return std::vector<Tensor>{l.dq, l.dk, l.dw, l.dbias, l.dw_bias, l.dlog_temperature, l.sums};
    });
}

TEST_CASE("an indexer whose queries are any of the keys: their choice, and a loss whose gradients add up",
          "[indexer][context]") {
  Context ctx(kTestScratch);
  for (const int64_t block : {1, 3})
    for (const bool every_key : {false, true})
      for (const int64_t documents : {1, 7}) {
        INFO("block " << block << ", every key " << every_key << ", documents " << documents);
        Pool pool(29);
        const Shape shape = {
            .tokens = 340, .heads = 4, .depth = 6, .sets = 2, .block = block, .documents = documents};
        Loss all(pool, ctx, shape, every_key, true);
        const Budget budget = {.policy = BudgetPolicy::inverse, .base = 5, .min = 2, .max = 9};
        const Tensor mean = pool.zeros(DType::f64, {1});
        Pool::set(mean, 0, 0.01);
        const Selection expected = all.c.selection(pool, budget);
        select_keys(ctx, expected, all.c.inputs(), budget, mean, all.sums, "a layer");
        if (!every_key) all.selection = expected;
        all.run(ctx);
        Loss whole = all;
        for (Tensor* t : {&whole.dk, &whole.dbias, &whole.dw_bias, &whole.dlog_temperature, &whole.sums})
          *t = pool.zeros(DType::f64, {t->numel()});
        whole.dk = whole.dk.view({shape.tokens, shape.depth});
        for (const auto& chunks : kChunks) {
          const SomeQueries some(pool, shape.tokens, chunks, all.c.first_key);
          Selection chosen = all.c.selection(pool, budget);
          chosen.first = pool.zeros(DType::i32, {shape.sets, some.size(), chosen.first.dim(2)});
          chosen.count = pool.zeros(DType::i32, {shape.sets, some.size()});
          IndexInputs in = all.c.inputs();
          in.q = some.of(pool, in.q), in.w = some.of(pool, in.w);
          in.first_key = some.first_key, in.own_key = some.own_key;
          select_keys(ctx, chosen, in, budget, mean, whole.sums, "a layer");
          CHECK(same_bits(chosen.first, some.of(pool, expected.first, 1)));
          CHECK(same_bits(chosen.count, some.of(pool, expected.count, 1)));
          const Tensor dq = pool.copy(in.q, DType::f64), dw = pool.copy(in.w, DType::f64),
                       dk = pool.copy(in.k, DType::f64);
          index_loss(ctx,
                     {.dq = dq,
                      .dk = dk,
                      .dw = dw,
                      .dbias = whole.dbias,
                      .dw_bias = whole.dw_bias,
                      .dlog_temperature = whole.dlog_temperature},
                     whole.sums, in,
                     {.q = some.of(pool, all.q),
                      .k = all.k,
                      .lse = some.of(pool, all.lse, 1),
                      .scale = Loss::kAttention,
                      .targets = some.of(pool, all.targets)},
                     every_key ? nullptr : &chosen,
                     {.coefficient = Loss::kCoefficient,
                      .log_temperature = all.log_temperature,
                      .gradient_scale = scalar(all.scale)});
          CHECK(relative_error(dq, some.of(pool, all.dq)) < 1e-14);
          CHECK(relative_error(dw, some.of(pool, all.dw)) < 1e-14);
          add_to(whole.dk, dk);
        }
        CHECK(Pool::get(all.sums, kIndexLoss) > 1);
        for (const auto member :
             {&Loss::sums, &Loss::dk, &Loss::dbias, &Loss::dw_bias, &Loss::dlog_temperature})
          CHECK(relative_error(whole.*member, all.*member) < 1e-12);
      }
}
