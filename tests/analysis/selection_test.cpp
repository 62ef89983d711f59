// Recall of sparse attention's selection: against counting, and at its limits.
#include "analysis/selection.h"

#include <catch2/catch.hpp>

#include "analysis/statistics.h"
#include "analysis/summary.h"
#include "support/model.h"

namespace sluice {
namespace {

using namespace test;

ModelConfig sparse(int64_t k) {
  ModelConfig c = tiny_config();
  c.num_hidden_layers = 2;
  c.attention.kind = AttentionKind::sparse;
  c.attention.sparse.indexer.heads = 2;
  c.attention.sparse.indexer.head_dim = 4;
  c.attention.sparse.k.base = k;
  return c;
}

/// Of the last forward pass.
ModelSummary summary_of_last(TestModel& m) {
  SummaryAccumulator summary(m.model, m.store, {});
  Context ctx(1 << 20);
  summary.add(ctx, m.batch.view(), m.saved);
  return summary.result();
}

ModelSummary summary_of(TestModel& m) {
  m.loss();
  return summary_of_last(m);
}

TokenBatch tokens() {
  TokenBatch b;
  b.add(random_tokens(31, 11, 1));
  return b;
}

}  // namespace

TEST_CASE("all keys hold all of dense attention; few hold less, and their neighbours' differ",
          "[selection]") {
  TestModel all(sparse(64), tokens()), few(sparse(5), tokens());
  all.randomize();
  few.randomize();
  const ModelSummary a = summary_of(all), b = summary_of(few);
  for (size_t layer = 0; layer < 2; ++layer) {
    REQUIRE(a.layers[layer].selection);
    CHECK(a.layers[layer].selection->mass == Approx(1));
    CHECK(a.layers[layer].selection->top == 1);
    const double overlap = a.layers[layer].selection->overlap;
    CHECK((layer == 0 ? std::isnan(overlap) : overlap == Approx(1)));  // the first has no layer before
    const SelectionSummary x = *b.layers[layer].selection;
    CHECK(x.keys == Approx((1 + 2 + 3 + 4 + 26 * 5) / 30.0));
    CHECK(x.keys_deviation ==
          Approx(std::sqrt((1 + 4 + 9 + 16 + 26 * 25) / 30.0 - std::pow(x.keys, 2))).margin(1e-9));
    CHECK(x.keys_least == 1);
    CHECK(x.keys_most == 5);
    CHECK(x.mass > 0.05);
    CHECK(x.mass < 0.999);
    CHECK(x.top < 1);
    CHECK(x.union_ratio > 1);
    CHECK(x.union_ratio < 8);
  }
}

TEST_CASE("which queries are looked at depends on their sequence alone, not on the others of the pass",
          "[selection]") {
  // 64 tokens: every second query of a sequence; in the pass of all four every eighth one would be looked at.
  const auto batch_of = [](const std::vector<uint32_t>& seeds) {
    TokenBatch b;
    for (const uint32_t seed : seeds) b.add(random_tokens(65, 11, seed));
    return b;
  };
  TestModel together(sparse(5), batch_of({1, 2, 3, 4}));
  together.randomize();
  const ModelSummary all = summary_of(together);
  SelectionSummary mean;
  for (const uint32_t seed : {1, 2, 3, 4}) {
    TestModel alone(sparse(5), batch_of({seed}));
    alone.randomize();
    const SelectionSummary x = *summary_of(alone).layers[1].selection;
    mean.mass += x.mass / 4, mean.top += x.top / 4, mean.keys += x.keys / 4;
    mean.divergence += x.divergence / 4, mean.union_ratio += x.union_ratio / 4, mean.overlap += x.overlap / 4;
  }
  const SelectionSummary x = *all.layers[1].selection;
  CHECK(x.mass == Approx(mean.mass));
  CHECK(x.top == Approx(mean.top));
  CHECK(x.keys == Approx(mean.keys));
  CHECK(x.keys == Approx((2 + 4 + 30 * 5) / 32.0));
  CHECK(x.divergence == Approx(mean.divergence));
  CHECK(x.union_ratio == Approx(mean.union_ratio));
  CHECK(x.overlap == Approx(mean.overlap));
}

TEST_CASE("a selection of the keys with most dense attention has recall 1 of these, and most of the mass",
          "[selection]") {
  // An oracle: its choice is made by hand from the dense attention of the first layer.
  TestModel m(sparse(5), tokens());
  m.randomize();
  m.loss();
  const Attention::Saved& s = m.saved.blocks[0].attention;
  const Tensor q = s.q_position.y, k = s.k_position.y;
  double mass = 0;
  for (int64_t t = 0; t < 30; ++t) {
    std::vector<std::pair<double, int64_t>> order;
    for (int64_t j = 0; j <= t; ++j) order.emplace_back(0, j);
    for (int64_t h = 0; h < 4; ++h) {
      std::vector<double> z;
      double sum = 0;
      for (int64_t j = 0; j <= t; ++j) {
        double x = 0;
        for (int64_t d = 0; d < 4; ++d)
          x += Pool::get(q, (t * 4 + h) * 4 + d) * Pool::get(k, (j * 2 + h / 2) * 4 + d);
        z.push_back(std::exp(x / 2));
        sum += z.back();
      }
      for (int64_t j = 0; j <= t; ++j)
        order[static_cast<size_t>(j)].first += z[static_cast<size_t>(j)] / sum / 4;
    }
    std::sort(order.rbegin(), order.rend());
    const int64_t count = std::min<int64_t>(5, t + 1), room = s.core.selection.first.dim(2);
    std::vector<int32_t> keys;
    for (int64_t i = 0; i < count; ++i) {
      keys.push_back(static_cast<int32_t>(order[static_cast<size_t>(i)].second));
      mass += order[static_cast<size_t>(i)].first / 30;
    }
    std::sort(keys.begin(), keys.end());
    std::copy(keys.begin(), keys.end(), s.core.selection.first.as<int32_t>() + t * room);
  }
  Context ctx(1 << 20);
  SelectionSums sums;
  add_selection(ctx, sums, m.model.blocks()[0].attention(), s, nullptr, m.batch.view().first_key,
                Queries(ctx, m.batch.view(), QueryClasses({})));
  const SelectionSummary x = means_of(sums);
  CHECK(x.top == Approx(1));
  CHECK(x.mass == Approx(mass));
}

TEST_CASE("the divergence of the selected keys is the indexer's loss of the same forward pass",
          "[selection]") {
  for (const int64_t block : {1, 4})
    for (const bool learned : {false, true}) {
      ModelConfig c = sparse(5);
      c.attention.sparse.block = block;
      c.attention.sparse.loss = {.coefficient = 1, .temperature = 3, .learn_temperature = learned};
      c.attention.sparse.scope = learned ? IndexScope::kv_head : IndexScope::all_heads;
      TestModel m(c, tokens());
      m.randomize();
      m.loss_and_gradient();
      const ModelSummary summary = summary_of_last(m);
      for (int64_t layer = 0; layer < 2; ++layer) {
        const double* const sums = m.load.indexers.row(layer).as<double>();
        CHECK(summary.layers[static_cast<size_t>(layer)].selection->divergence ==
              Approx(sums[kIndexLoss] / sums[kIndexCounted]).epsilon(1e-9));
        CHECK(sums[kIndexLoss] > 0);
      }
    }
}

TEST_CASE("an indexer whose scores are the heads' mean logits selects the keys with the largest",
          "[selection]") {
  // relu(u) - relu(-u) = u, where the indexer's query is the mean of the heads' and its key theirs.
  for (const int64_t heads : {1, 2}) {
    ModelConfig c = sparse(5);
    c.num_attention_heads = heads, c.num_key_value_heads = 1;
    c.qk_norm = false;
    IndexerConfig& x = c.attention.sparse.indexer;
    x.head_dim = c.head_dim;
    x.activation = IndexActivation::relu, x.head_weights = IndexHeadWeights::linear, x.rope = true;
    TestModel m(c, tokens());
    m.randomize();
    const int64_t D = c.head_dim, C = c.hidden_size;
    for (const std::string layer : {"model.layers.0.self_attn", "model.layers.1.self_attn"}) {
      const auto value = [&](const std::string& name) { return m.store.value(m.id(layer + name)); };
      const Tensor q = value(".q_proj.weight"), index_q = value(".indexer.query_proj.weight");
      for (int64_t i = 0; i < D * C; ++i) {
        double mean = 0;
        for (int64_t h = 0; h < heads; ++h) mean += Pool::get(q, h * D * C + i) / static_cast<double>(heads);
        Pool::set(index_q, i, mean), Pool::set(index_q, D * C + i, -mean);
        Pool::set(value(".indexer.key_proj.weight"), i, Pool::get(value(".k_proj.weight"), i));
      }
      for (int64_t i = 0; i < 2 * C; ++i) Pool::set(value(".indexer.weights_proj.weight"), i, 0);
      for (int64_t j = 0; j < 2; ++j) {
        Pool::set(value(".indexer.bias"), j, 0);
        Pool::set(value(".indexer.weights_proj.bias"), j, j == 0 ? 1 : -1);
      }
    }
    const ModelSummary summary = summary_of(m);
    for (size_t layer = 0; layer < 2; ++layer) {
      if (heads == 1) CHECK(summary.layers[layer].selection->top == 1);
      const Attention::Saved& s = m.saved.blocks[layer].attention;
      int64_t hits = 0;
      for (int64_t t = 0; t < 30; ++t) {
        std::vector<std::pair<double, int64_t>> order;
        for (int64_t j = 0; j <= t; ++j) {
          double z = 0;
          for (int64_t i = 0; i < heads * D; ++i)
            z += Pool::get(s.q_position.y, t * heads * D + i) * Pool::get(s.k_position.y, j * D + i % D);
          order.emplace_back(z, j);
        }
        std::sort(order.rbegin(), order.rend());
        for (int64_t i = 0; i < std::min<int64_t>(5, t + 1); ++i)
          hits += s.core.selection.contains(0, t, order[static_cast<size_t>(i)].second);
      }
      CHECK(hits == 1 + 2 + 3 + 4 + 26 * 5);
    }
  }
}

TEST_CASE("the statistics of an analysis hold the same, and ranks merge them", "[selection]") {
  TestModel m(sparse(5), tokens());
  m.randomize();
  const ModelSummary summary = summary_of(m);
  Context ctx(1 << 20);
  Statistics one(m.model, m.batch.size()), two(m.model, m.batch.size());
  one.add(ctx, m.batch.view(), m.saved);
  for (int i = 0; i < 2; ++i) two.add(ctx, m.batch.view(), m.saved);
  one.merge(two);
  for (size_t layer = 0; layer < 2; ++layer) {
    const SelectionSummary a = means_of(one.layers[layer].selection), b = *summary.layers[layer].selection;
    CHECK(one.layers[layer].selection.queries == 90);
    CHECK(a.mass == Approx(b.mass));
    CHECK(a.divergence == Approx(b.divergence));
    CHECK(a.keys_deviation == Approx(b.keys_deviation));
    CHECK(a.keys_least == 1);
    CHECK(a.keys_most == 5);
    CHECK((layer == 0 ? std::isnan(a.overlap) && std::isnan(b.overlap) : a.overlap == Approx(b.overlap)));
  }
}

TEST_CASE("the dense warm-up and other kinds of attention select nothing to measure", "[selection]") {
  ModelConfig c = sparse(5);
  c.attention.sparse.phase = SparsePhase::dense_warm_up;
  TestModel warm_up(c, tokens()), softmax(tiny_config(), tokens());
  CHECK_FALSE(summary_of(warm_up).layers[0].selection);
  CHECK_FALSE(summary_of(softmax).layers[0].selection);
}

}  // namespace sluice
