// Sparse attention: the choice of keys, attention on them, the indexer's loss. Scores of the choice are
// exact, or monotone functions of exact numbers, so that every backend chooses the same keys.
#include <spdlog/fmt/fmt.h>

#include <cmath>

#include "core/targets.h"
#include "ops/attention.h"
#include "ops/cases.h"
#include "ops/level_scores.h"
#include "ops/made_queries.h"
#include "ops/query_places.h"
#include "ops/sparse_attention.h"

namespace sluice::test {
namespace {

struct Shape {
  int64_t tokens, queries;
  int64_t heads = 4, kv_heads = 2, depth = 64;
  int64_t index_heads = 1, index_depth = 32, sets = 1, block = 1, document = 1 << 20;
  IndexActivation activation = IndexActivation::sigmoid;
  IndexHeadWeights weights = IndexHeadWeights::sigmoid;
  int64_t ranks = 1, rank = 0;

  std::string text() const {
    return fmt::format(
        "T={} Tq={} rank={}/{} H={}/{} D={} J={} d={} G={} b={} document={} activation={} "
        "weights={}",
        tokens, queries, rank, ranks, heads, kv_heads, depth, index_heads, index_depth, sets, block, document,
        static_cast<int>(activation), static_cast<int>(weights));
  }
  QueryPlaces places() const { return {queries, tokens, ranks, rank}; }
  int64_t first(int64_t t) const { return places().own(t) / document * document; }
  int64_t candidates(int64_t t) const {
    const int64_t before = places().own(t) - first(t);
    return block == 1 ? before + 1 : before / block;
  }
};

Tensor first_keys(CaseRun& run, const Shape& s) {
  return s.places().first_key(run, [&](int64_t key) { return key / s.document * s.document; });
}

/// Quarters between -1 and 1.
Tensor quarters(CaseRun& run, const std::string& name, std::initializer_list<int64_t> dims, int64_t factor) {
  return run.input(name, run.dtype, dims,
                   [factor](int64_t i) { return static_cast<double>(i * factor % 97 % 9 - 4) / 4; });
}

IndexInputs index_inputs(CaseRun& run, const Shape& s, bool bias) {
  IndexInputs in;
  in.q = quarters(run, "index_q", {s.queries, s.index_heads, s.index_depth}, 31);
  in.k = quarters(run, "index_k", {s.tokens, s.index_depth}, 57);
  if (s.weights != IndexHeadWeights::none) in.w = quarters(run, "index_w", {s.queries, s.index_heads}, 13);
  if (bias) in.bias = quarters(run, "index_bias", {s.index_heads}, 5);
  if (bias && in.w) in.w_bias = quarters(run, "index_w_bias", {s.index_heads}, 3);
  in.first_key = first_keys(run, s), in.own_key = s.places().own_key(run);
  in.scale = 0.25, in.sets = s.sets, in.block = s.block;
  in.activation = s.activation, in.head_weights = s.weights;
  return in;
}

OpCase select_case(const Shape& s, const Budget& budget, double mean_variance = 0) {
  const std::string name = fmt::format("select_keys {} policy={} base={} self={}", s.text(),
                                       static_cast<int>(budget.policy), budget.base, budget.force_self);
  return {
      name, [s, budget, mean_variance](CaseRun& run) {
        const IndexInputs in = index_inputs(run, s, s.index_heads > 1);
        Selection out;
        out.first = run.output("first", DType::i32,
                               {s.sets, s.queries, selection_room(budget.most(), s.tokens, s.block)});
        out.count = run.output("count", DType::i32, {s.sets, s.queries});
        out.first_key = in.first_key, out.block = s.block;
        const Tensor mean =
            run.input("mean_variance", DType::f32, {1}, [mean_variance](int64_t) { return mean_variance; });
        select_keys(run.ctx, out, in, budget, mean, run.inout("sums", DType::f64, {kIndexSums}), "a layer",
                    run.input("targets", DType::i32, {s.queries},
                              [](int64_t t) { return t % 5 == 3 ? kPadding : 1.; }));
      }};
}

/// A choice by arithmetic: candidate c of query t if (7 c + 3 t + set) % every == 0, and the last one.
Selection selection(CaseRun& run, const Shape& s, int64_t every) {
  std::vector<std::vector<int32_t>> rows;
  size_t most = 1;
  for (int64_t set = 0; set < s.sets; ++set)
    for (int64_t t = 0; t < s.queries; ++t) {
      std::vector<int32_t>& row = rows.emplace_back();
      const int64_t n = s.candidates(t);
      const auto choose = [&](int64_t c) { row.push_back(static_cast<int32_t>(s.first(t) + c * s.block)); };
      for (int64_t c = 0; c < n; ++c)
        if ((7 * c + 3 * t + set) % every == 0 || (s.block == 1 && c == n - 1)) choose(c);
      if (s.block > 1) choose(n);
      most = std::max(most, row.size());
    }
  const auto room = static_cast<int64_t>(most);
  Selection out;
  out.first = run.input("selected", DType::i32, {s.sets, s.queries, room}, [&](int64_t i) {
    const auto& row = rows[static_cast<size_t>(i / room)];
    return i % room < std::ssize(row) ? row[static_cast<size_t>(i % room)] : -1.0;
  });
  out.count = run.input("selected_count", DType::i32, {s.sets, s.queries},
                        [&](int64_t i) { return static_cast<double>(rows[static_cast<size_t>(i)].size()); });
  out.first_key = first_keys(run, s), out.block = s.block;
  return out;
}

AttentionInputs attention_inputs(CaseRun& run, const Shape& s) {
  AttentionInputs in;
  in.q = run.input("q", {s.queries, s.heads, s.depth});
  in.k = run.input("k", {s.tokens, s.kv_heads, s.depth});
  in.v = run.input("v", {s.tokens, s.kv_heads, s.depth});
  in.first_key = first_keys(run, s), in.own_key = s.places().own_key(run);
  in.scale = 0.3 / std::sqrt(static_cast<double>(s.depth));
  return in;
}

AttentionState attention_state(CaseRun& run, const Shape& s) {
  return {run.output("o", {s.queries, s.heads, s.depth}), run.output("lse", run.wide, {s.heads, s.queries}),
          run.output("z0", run.wide, {s.heads, s.queries})};
}

OpCase attention_case(const Shape& s, int64_t every) {
  return {fmt::format("sparse_attention {} every={}", s.text(), every),
          [s, every](CaseRun& run) {
            const AttentionInputs in = attention_inputs(run, s);
            const Selection keys = selection(run, s, every);
            const AttentionState state = attention_state(run, s);
            sparse_attention_forward(run.ctx, state, in, keys);
            if (!s.places().trains()) return;
            AttentionGrads grads = {.dq = {},
                                    .dk = run.output("dk", {s.tokens, s.kv_heads, s.depth}),
                                    .dv = run.output("dv", {s.tokens, s.kv_heads, s.depth})};
            set_queries(run, grads, every % 2 == 1 ? Made::by_rope : Made::plainly, s.queries, s.heads,
                        s.depth);
            const ScoreGrads of_scores = {run.input("dlse", run.wide, {s.heads, s.queries}),
                                          run.input("coef0", run.wide, {s.heads, s.queries}, 0.1)};
            sparse_attention_backward(run.ctx, grads, run.input("d_o", {s.queries, s.heads, s.depth}), in,
                                      state, keys, of_scores);
          },
          // On tensor cores weights are rounded to bf16 before the products, and a query has few of them.
          2};
}

OpCase level_scores_case(const Shape& s, int64_t every) {
  return {fmt::format("sparse_attention {} every={} scores alike", s.text(), every),
          [s, every](CaseRun& run) {
            const AttentionInputs in = level_scores(run, s.places(), s.heads, s.kv_heads, s.depth);
            sparse_attention_forward(run.ctx, attention_state(run, s), in, selection(run, s, every));
          },
          2};
}

/// every == 0: the loss over all candidates. The gradient of a head's weight is a sum of differences of two
/// distributions, which cancel: f32 leaves the more of their rounding, beside its tolerance.
OpCase loss_case(const Shape& s, int64_t every, bool learned, DType type) {
  const std::string name = fmt::format("index_loss {} every={} learned={}", s.text(), every, learned);
  return {name,
          [s, every, learned](CaseRun& run) {
            const AttentionInputs in = attention_inputs(run, s);
            const AttentionState state = attention_state(run, s);
            Selection keys;
            if (every) {
              keys = selection(run, s, every);
              sparse_attention_forward(run.ctx, state, in, keys);
            } else {
              attention_forward(run.ctx, state, in);
            }
            const IndexInputs index = index_inputs(run, s, true);
            IndexGrads grads{.dq = run.output("index_dq", {s.queries, s.index_heads, s.index_depth}),
                             .dk = run.output("index_dk", {s.tokens, s.index_depth})};
            if (index.w) grads.dw = run.output("index_dw", {s.queries, s.index_heads});
            grads.dbias = run.inout("index_dbias", run.wide, {s.index_heads});
            if (index.w) grads.dw_bias = run.inout("index_dw_bias", run.wide, {s.index_heads});
            IndexLoss loss;
            loss.coefficient = 1.5, loss.temperature = 0.75;
            if (learned) {
              loss.log_temperature = run.input("log_temperature", {1}, 0.25);
              grads.dlog_temperature = run.inout("dlog_temperature", run.wide, {1});
            }
            loss.gradient_scale = run.input("gradient_scale", DType::f64, {1}, [](int64_t) { return 0.125; });
            const IndexTarget target = {
                .q = in.q,
                .k = in.k,
                .lse = state.lse,
                .scale = in.scale,
                .targets = run.input("targets", DType::i32, {s.queries},
                                     [](int64_t t) { return t % 5 == 3 ? -100.0 : 1.0; })};
            index_loss(run.ctx, grads, run.inout("sums", DType::f64, {kIndexSums}), index, target,
                       every ? &keys : nullptr, loss);
          },
          type == DType::f32 ? 32.0 : 2.0, type == DType::f32, type == DType::bf16};
}

OpCase means_case(int64_t tokens, int64_t depth, int64_t block, int64_t document) {
  return {
      fmt::format("block_means T={} d={} b={} document={}", tokens, depth, block, document),
      [=](CaseRun& run) {
        const Tensor first = first_keys(run, {.tokens = tokens, .queries = tokens, .document = document});
        block_means(run.ctx, run.output("y", {tokens, depth}), run.input("x", {tokens, depth}), first, block);
        block_means_backward(run.ctx, run.output("dx", {tokens, depth}), run.input("dy", {tokens, depth}),
                             first, block);
      }};
}

constexpr Budget fixed(int64_t k, bool self = false) {
  return {.policy = BudgetPolicy::fixed, .base = k, .max = k, .force_self = self};
}

OpCase random_case(Random& random) {
  Shape s = {.tokens = uniform(random, 1, 150), .queries = 0};
  s.queries = s.tokens;
  if (uniform(random, 0, 3) == 0) {
    const QueryPlaces p = QueryPlaces::random(random, 25);
    s.queries = p.queries, s.tokens = p.keys, s.ranks = p.ranks, s.rank = p.rank;
  }
  s.sets = one_of<int64_t>(random, {1, 2});
  s.kv_heads = s.sets * uniform(random, 1, 2), s.heads = s.kv_heads * uniform(random, 1, 5);
  s.depth = one_of<int64_t>(random, {8, 64, 72, 128});
  s.index_heads = s.sets, s.index_depth = one_of<int64_t>(random, {4, 32, 40, 64});
  s.block = one_of<int64_t>(random, {1, 1, 3, 16});
  s.document = one_of<int64_t>(random, {1, 13, 64, 1000});
  s.activation = one_of(random, {IndexActivation::sigmoid, IndexActivation::relu});
  s.weights = one_of(random, {IndexHeadWeights::sigmoid, IndexHeadWeights::none});
  switch (uniform(random, 0, 2)) {
    case 0:
      if (s.ranks == 1) s.queries = uniform(random, 1, s.tokens);
      return select_case(s, fixed(uniform(random, 1, 80), uniform(random, 0, 1)));
    case 1:
      return attention_case(s, one_of<int64_t>(random, {1, 2, 3, 5, 9, 40, 40}));
    default:  // of several blocks: the gradient of one alone is rounding
      s.block = std::min<int64_t>(s.block, 3);
      if (s.ranks == 1) s.queries = s.tokens + 20 * s.block;
      if (s.ranks > 1) s.queries += 2 * s.block;
      s.tokens = s.ranks * s.queries;
      s.document = std::max<int64_t>(s.document, 20 * s.block);
      return loss_case(s, one_of<int64_t>(random, {0, 2, 3}), uniform(random, 0, 1),
                       one_of(random, {DType::f32, DType::bf16}));
  }
}

}  // namespace

OpFamily sparse_cases() {
  OpFamily f = {.name = "sparse", .cases = {}, .fuzz = random_case};
  const Shape longer = {.tokens = 300, .queries = 300},
              documents = {.tokens = 200, .queries = 200, .document = 37};
  for (const int64_t k : {1, 17, 64, 299, 400}) f.cases.push_back(select_case(longer, fixed(k)));
  f.cases.push_back(select_case(documents, fixed(9, true)));
  f.cases.push_back(select_case({.tokens = 260, .queries = 70, .document = 90}, fixed(20)));
  f.cases.push_back(select_case({.tokens = 1, .queries = 1}, fixed(4)));
  // Sums of ReLUs are exact.
  Shape relu = {.tokens = 150,
                .queries = 150,
                .index_heads = 4,
                .index_depth = 64,
                .sets = 2,
                .activation = IndexActivation::relu,
                .weights = IndexHeadWeights::linear};
  f.cases.push_back(select_case(relu, fixed(30)));
  relu.weights = IndexHeadWeights::none, relu.block = 4, relu.document = 61;
  f.cases.push_back(select_case(relu, fixed(5)));
  relu.index_depth = 128;
  f.cases.push_back(select_case(relu, fixed(3, true)));
  for (const BudgetPolicy policy :
       {BudgetPolicy::eq8, BudgetPolicy::inverse, BudgetPolicy::code, BudgetPolicy::entropy})
    for (const double mean : {0.0, 0.011})
      f.cases.push_back(select_case(
          documents, {.policy = policy, .base = 11, .min = 4, .max = 30, .temperature = 0.7}, mean));
  // Of one in 40 candidates neighbouring queries select different ones, and few queries select a key: tiles
  // are divided, and keys have partial sums (cuda/sparse).
  for (const int64_t every : {1, 3, 40}) f.cases.push_back(attention_case(longer, every));
  for (const int64_t heads : {1, 4, 16, 32})
    f.cases.push_back(
        attention_case({.tokens = 130, .queries = 130, .heads = heads, .kv_heads = 1, .depth = 128}, 40));
  f.cases.push_back(attention_case(
      {.tokens = 400, .queries = 400, .heads = 8, .kv_heads = 4, .sets = 2, .block = 2, .document = 330},
      40));
  for (const int64_t depth : {64, 128})
    for (const int64_t heads : {2, 16})
      f.cases.push_back(level_scores_case(
          {.tokens = 1000, .queries = 20, .heads = heads, .kv_heads = 1, .depth = depth}, 1));
  f.cases.push_back(attention_case(documents, 5));
  f.cases.push_back(attention_case({.tokens = 150, .queries = 40, .depth = 128}, 4));
  f.cases.push_back(attention_case({.tokens = 1, .queries = 1}, 1));
  f.cases.push_back(attention_case({.tokens = 140,
                                    .queries = 140,
                                    .heads = 12,
                                    .kv_heads = 4,
                                    .depth = 40,
                                    .sets = 2,
                                    .block = 16,
                                    .document = 75},
                                   2));
  f.cases.push_back(attention_case(
      {.tokens = 170, .queries = 170, .heads = 8, .kv_heads = 4, .sets = 2, .block = 16, .document = 75}, 2));
  f.cases.push_back(
      attention_case({.tokens = 90, .queries = 90, .heads = 16, .kv_heads = 1, .depth = 128}, 3));
  f.cases.push_back(
      attention_case({.tokens = 70, .queries = 70, .heads = 3, .kv_heads = 3, .depth = 128}, 3));
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const bool learned : {false, true}) {
      f.cases.push_back(
          loss_case({.tokens = 90, .queries = 90, .index_heads = 4, .index_depth = 40}, 3, learned, type));
      f.cases.push_back(
          loss_case({.tokens = 90, .queries = 90, .index_heads = 4, .document = 33}, 0, learned, type));
    }
    for (const int64_t depth : {24, 64})  // blocks of 3: some begin in one tile of keys and end in the next
      for (const int64_t every : {0, 2})
        f.cases.push_back(loss_case({.tokens = 140,
                                     .queries = 140,
                                     .heads = 8,
                                     .kv_heads = 4,
                                     .depth = depth,
                                     .index_heads = 6,
                                     .index_depth = 16,
                                     .sets = 2,
                                     .block = depth == 64 ? 3 : 4,
                                     .document = 101,
                                     .activation = IndexActivation::relu,
                                     .weights = IndexHeadWeights::linear},
                                    every, false, type));
    f.cases.push_back(
        loss_case({.tokens = 70, .queries = 70, .weights = IndexHeadWeights::none}, 4, false, type));
  }
  // More keys than a block of the kernel goes through.
  f.cases.push_back(
      loss_case({.tokens = 600, .queries = 600, .heads = 2, .kv_heads = 1}, 0, false, DType::bf16));
  // A rank's two chunks of a shared sequence.
  Shape shared = {
      .tokens = 264, .queries = 88, .index_heads = 2, .sets = 2, .document = 101, .ranks = 3, .rank = 1};
  f.cases.push_back(select_case(shared, fixed(20)));
  f.cases.push_back(
      select_case(shared, {.policy = BudgetPolicy::eq8, .base = 11, .min = 4, .max = 30}, 0.011));
  for (const int64_t every : {2, 40}) f.cases.push_back(attention_case(shared, every));
  shared.depth = 40, shared.document = 1000;
  f.cases.push_back(attention_case(shared, 3));
  for (const int64_t depth : {40, 64})
    for (const DType type : {DType::f32, DType::bf16})
      for (const int64_t every : {0, 3}) {
        shared.depth = depth, shared.block = every == 0 ? 1 : 4;
        f.cases.push_back(loss_case(shared, every, true, type));
      }
  shared.block = 4;
  f.cases.push_back(select_case(shared, fixed(3)));
  f.cases.push_back(attention_case(shared, 2));
  f.cases.push_back(means_case(47, 5, 4, 17));
  f.cases.push_back(means_case(64, 32, 16, 1000));
  return f;
}

}  // namespace sluice::test
