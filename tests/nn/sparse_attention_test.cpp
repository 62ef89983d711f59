// Layers of sparse attention: gradients, the indexer's loss, phases, documents, generation.
#include "nn/sparse_attention.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "support/enums.h"
#include "support/model.h"

namespace sluice {
namespace {

using namespace test;

ModelConfig sparse_config(int64_t k = 2) {
  ModelConfig c = tiny_config();
  c.num_hidden_layers = 2;
  c.attention.kind = AttentionKind::sparse;
  SparseConfig& s = c.attention.sparse;
  s.indexer.heads = 4;
  s.indexer.head_dim = 6;
  s.k.base = k;
  return c;
}

TokenBatch two_documents(uint32_t first = 1, uint32_t second = 2) {
  TokenBatch b;
  b.add(random_tokens(13, 11, first));
  b.add(random_tokens(9, 11, second));
  b.targets[3] = -1;
  return b;
}

/// What every layer selects.
std::vector<int32_t> selected(const TestModel& m) {
  std::vector<int32_t> all;
  for (const Block::Saved& block : m.saved.blocks) {
    const Selection& s = block.attention.core.selection;
    all.insert(all.end(), s.first.as<int32_t>(), s.first.as<int32_t>() + s.first.numel());
    all.insert(all.end(), s.count.as<int32_t>(), s.count.as<int32_t>() + s.count.numel());
  }
  return all;
}

std::string gradient_bits(const TestModel& m, const std::string& without = "?") {
  std::string bits;
  for (size_t i = 0; i < m.store.specs().size(); ++i) {
    if (m.store.specs()[i].name.find(without) != std::string::npos) continue;
    const Tensor g = m.store.grad(static_cast<ParamStore::Id>(i));
    if (g) bits.append(static_cast<const char*>(g.data), static_cast<size_t>(g.bytes()));
  }
  return bits;
}

bool of_indexer(const ParamSpec& spec) { return spec.name.find(".indexer.") != std::string::npos; }

/// Compares the gradients of all parameters (of the indexer, or all others) with differences of loss(), in
/// which no query may select other keys.
void check_gradients(TestModel& m, bool indexer, const std::function<double()>& loss, int64_t samples = 3) {
  const std::vector<int32_t> base = selected(m);
  double worst = 0, largest = 0;
  std::string where;
  int64_t flips = 0;
  // By hand, for gradients are kept apart from what loss() leaves.
  Pool pool;
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < m.store.specs().size(); ++i) {
    const Tensor g = m.store.grad(static_cast<ParamStore::Id>(i));
    gradients.push_back(g ? pool.copy(g, DType::f64) : Tensor());
  }
  for (size_t i = 0; i < m.store.specs().size(); ++i) {
    const ParamSpec& spec = m.store.specs()[i];
    if (of_indexer(spec) != indexer || !spec.trainable) continue;
    const double error = gradient_error(
        m.store.value(static_cast<ParamStore::Id>(i)), gradients[i],
        [&] {
          const double x = loss();
          flips += selected(m) != base;
          return x;
        },
        samples, 1e-6);
    for (int64_t j = 0; j < spec.numel(); ++j)
      largest = std::max(largest, std::abs(Pool::get(gradients[i], j)));
    if (!(error <= worst)) worst = error, where = spec.name;
  }
  INFO("worst: " << where);
  CHECK(flips == 0);
  CHECK(worst < 2e-7);
  CHECK(largest > 1e-3);
}

/// Variants of everything that the indexer can be.
std::vector<ModelConfig> variants() {
  std::vector<ModelConfig> all;
  for_each_value<IndexActivation>([&](IndexActivation activation) {
    for_each_value<IndexHeadWeights>([&](IndexHeadWeights weights) {
      for_each_value<IndexScope>([&](IndexScope scope) {
        ModelConfig c = sparse_config();
        SparseConfig& s = c.attention.sparse;
        const size_t turn = all.size();
        s.scope = scope;
        s.indexer.activation = activation;
        s.indexer.head_weights = weights;
        s.indexer.bias = turn % 3 != 0;
        s.indexer.rope = turn % 2 == 0;
        s.indexer.key_norm = turn / 2 % 2 == 0;
        s.block = turn % 4 == 3 ? 3 : 1;
        s.k.base = s.block > 1 ? 2 : 3;
        s.force_self = s.block == 1 && turn % 5 == 0;
        s.loss.learn_temperature = turn % 3 == 1;
        s.loss.temperature = 1.4;
        s.sink = turn / 3 % 2 == 0;
        all.push_back(c);
      });
    });
  });
  return all;
}

}  // namespace

TEST_CASE("sparse layers: gradients of the text's loss equal central differences", "[sparse][gradient]") {
  const OneThread one_thread;
  for (ModelConfig c : variants()) {
    for_each_value<GatePosition>([&](GatePosition position) {
      GateConfig g;
      g.position = position;
      c.attention.gates.push_back(g);
    });
    if (c.attention.sparse.sink) c.attention.output_norm = OutputNorm::rmsnorm;
    TestModel m(c, two_documents());
    m.randomize(6);  // no two index scores so close that a difference quotient exchanges them
    m.loss_and_gradient();
    check_gradients(m, false, [&] { return m.loss(); });
  }
}

TEST_CASE("the indexer's loss is a mean over tokens and layers, and its gradients those of the parameters",
          "[sparse][gradient]") {
  const OneThread one_thread;
  for (const bool warm_up : {false, true})
    for (ModelConfig c : variants()) {
      c.num_hidden_layers = 1;  // a second layer's input changes with nothing of the indexer, if k >= T alone
      SparseConfig& s = c.attention.sparse;
      s.loss.coefficient = 1.5;
      if (warm_up) s.phase = SparsePhase::dense_warm_up;
      TestModel m(c, two_documents());
      m.randomize();
      m.loss_and_gradient();
      check_gradients(m, true, [&] {
        m.loss_and_gradient();
        const double* const row = m.load.indexers.sums.as<double>();
        CHECK(row[kIndexCounted] == (s.scope == IndexScope::kv_head ? 2 : 1) * 19);
        return 1.5 * row[kIndexLoss] / row[kIndexCounted];
      });
    }
}

TEST_CASE(
    "a detached indexer leaves all other gradients as they are; otherwise its loss reaches the layers below",
    "[sparse]") {
  const OneThread one_thread;
  std::vector<std::string> bits;
  for (const double coefficient : {0.0, 2.0, 2.0}) {
    ModelConfig c = sparse_config(3);
    c.attention.sparse.loss.coefficient = coefficient;
    c.attention.sparse.indexer.detach_input = bits.size() < 2;
    TestModel m(c, two_documents());
    m.randomize();
    m.loss_and_gradient();
    bits.push_back(gradient_bits(m, ".indexer."));
  }
  CHECK((bits[0] == bits[1]));
  CHECK((bits[0] != bits[2]));
}

TEST_CASE("the gradient of the input of an indexer that is not detached equals central differences",
          "[sparse]") {
  const OneThread one_thread;
  for (ModelConfig c : variants()) {
    c.attention.sparse.indexer.detach_input = false;
    c.attention.sparse.loss.coefficient = 1;
    ParamStore store;
    const Indexer indexer(c, store, "indexer");
    Context ctx(1 << 24);
    Arena values("values", 1 << 16), grads("gradients", 1 << 16), memory("memory", 1 << 18);
    store.allocate(ctx, DType::f64, 21, values, &grads);
    Pool pool(3);
    const Tensor random = pool.normal(DType::f64, {400});
    for (size_t i = 0; i < store.specs().size(); ++i)
      for (int64_t j = 0; j < store.specs()[i].numel(); ++j)
        Pool::set(store.value(static_cast<ParamStore::Id>(i)), j,
                  0.4 * Pool::get(random, (j * 7 + 31 * static_cast<int64_t>(i)) % 400));
    TokenBatch tokens = two_documents();
    const Batch batch = tokens.view();
    const int64_t T = tokens.size();
    IndexerLoad load = make_indexer_load(c, memory);
    double scale = 0.1;
    load.gradient_scale = scalar(scale);
    // Tables by hand: any rotation will do.
    const Tensor cos = pool.zeros(DType::f64, {T, 3}), sin = pool.zeros(DType::f64, {T, 3});
    for (int64_t i = 0; i < cos.numel(); ++i)
      Pool::set(cos, i, std::cos(0.3 * static_cast<double>(i))),
          Pool::set(sin, i, std::sin(0.3 * static_cast<double>(i)));
    Sequence sequence;
    sequence.positions = batch.positions, sequence.first_key = batch.first_key;
    sequence.targets = batch.targets, sequence.indexers = &load;
    sequence.index_cos = cos, sequence.index_sin = sin;
    const Tensor x = pool.normal(DType::f64, {T, 6}), dx = pool.normal(DType::f64, {T, 6});
    const Tensor q = pool.normal(DType::f64, {T, 4, 4}), k = pool.normal(DType::f64, {T, 2, 4}),
                 o = pool.zeros(DType::f64, {T, 4, 4}), lse = pool.zeros(DType::f64, {4, T});
    attention_forward(ctx, {.o = o, .lse = lse},
                      {.q = q, .k = k, .v = k, .first_key = batch.first_key, .scale = 0.5});
    const IndexTarget target = {.q = q, .k = k, .lse = lse, .scale = 0.5, .targets = batch.targets};
    Indexer::Saved s = indexer.make_saved(memory, "indexer", T, DType::f64);
    const auto loss = [&] {
      fill(ctx, load.sums, 0);
      indexer.project(ctx, x, sequence, s);
      indexer.keep(ctx, sequence, 0, s);
      Into into = Into::overwrite;
      const Tensor other = pool.zeros(DType::f64, {T, 6});
      indexer.backward(ctx, other, into, x, sequence, target, nullptr, 0, s);
      return scale * load.sums.as<double>()[kIndexLoss] / static_cast<double>(2 * indexer.sets());
    };
    loss();
    Into into = Into::overwrite;
    indexer.backward(ctx, dx, into, x, sequence, target, nullptr, 0, s);
    CHECK(into == Into::add);
    CHECK(gradient_error(x, dx, loss, 20, 1e-6) < 1e-6);
  }
}

TEST_CASE("sparse attention over as many keys as there are equals softmax attention, in both phases",
          "[sparse]") {
  const OneThread one_thread;
  for (ModelConfig c : variants()) {
    c.attention.sparse.k.base = 100;
    ModelConfig dense = c;
    dense.attention.kind = c.attention.sparse.sink ? AttentionKind::sink : AttentionKind::softmax;
    c.attention.gates = dense.attention.gates = {GateConfig{}};
    TestModel b(dense, two_documents());
    b.randomize();
    const std::vector<double> expected = b.logits();
    for (const auto phase : {SparsePhase::sparse, SparsePhase::dense_warm_up}) {
      c.attention.sparse.phase = phase;
      TestModel a(c, two_documents());
      a.copy_from(b);
      const std::vector<double> got = a.logits();
      double worst = 0;
      for (size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(got[i] - expected[i]));
      CHECK(worst < 1e-12);
    }
  }
}

TEST_CASE("documents do not see each other: in another order each has the same logits", "[sparse]") {
  const OneThread one_thread;
  for (const ModelConfig& c : variants()) {
    TokenBatch swapped;
    swapped.add(random_tokens(9, 11, 2));
    swapped.add(random_tokens(13, 11, 1));
    TestModel a(c, two_documents()), b(c, swapped);
    a.randomize();
    b.randomize();
    const std::vector<double> x = a.logits(), y = b.logits();
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t V = 11, t = i / V, u = t < 12 ? t + 8 : t - 12;
      worst = std::max(worst, std::abs(x[i] - y[u * V + i % V]));
    }
    CHECK(worst < 1e-12);
  }
}

TEST_CASE("recomputed blocks select the same keys and give the same bits", "[sparse][recompute]") {
  for (ModelConfig c : variants()) {
    c.num_hidden_layers = 3;
    c.attention.sparse.loss.coefficient = 1;
    std::vector<std::string> bits;
    for (const Recompute recompute : {Recompute::none, Recompute::block}) {
      TestModel m(c, two_documents(), DType::f32, recompute);
      m.randomize();
      m.loss_and_gradient();
      bits.push_back(gradient_bits(m));
      const Tensor& sums = m.load.indexers.sums;
      bits.back().append(static_cast<const char*>(sums.data), static_cast<size_t>(sums.bytes()));
    }
    CHECK((bits[0] == bits[1]));
  }
}

TEST_CASE("generation with cached index keys equals the forward pass of the whole", "[sparse][cache]") {
  const OneThread one_thread;
  std::vector<ModelConfig> all = variants();
  for_each_value<BudgetPolicy>([&](BudgetPolicy policy) {
    ModelConfig c = sparse_config(4);
    c.attention.sparse.k = {.policy = policy, .base = 4, .min = 2, .max = 7};
    all.push_back(c);
  });
  for (const ModelConfig& c : all) {
    TokenBatch tokens;
    tokens.add(random_tokens(18, 11, 4));
    TestModel m(c, tokens);
    m.randomize();
    for (const Tensor& mean : m.model.index_variances()) Pool::set(mean, 0, 0.01);
    const std::vector<double> expected = m.logits();
    Arena memory("generation", 1 << 21);
    Context ctx(1 << 24);
    KeyValueCache cache = m.model.make_cache(memory, 17, DType::f64);
    double worst = 0;
    for (int64_t begin = 0, count = 0; begin < 17; begin += count) {
      count = begin == 0 ? 5 : begin == 5 ? 3 : 1;
      Transformer::Saved s = m.model.make_saved(memory, count, DType::f64, Recompute::none);
      const Batch b = m.batch.view();
      m.model.forward(ctx,
                      {.tokens = b.tokens.rows(begin, count),
                       .targets = b.targets.rows(begin, count),
                       .positions = b.positions.rows(begin, count),
                       .first_key = b.first_key.rows(begin, count)},
                      s, {}, &cache);
      Pool pool;
      const Tensor out = pool.zeros(DType::f64, {count, 11});
      m.model.logits(ctx, out, s.hidden);
      for (int64_t i = 0; i < count * 11; ++i)
        worst = std::max(worst, std::abs(Pool::get(out, i) - expected[static_cast<size_t>(begin * 11 + i)]));
    }
    CHECK(worst < 1e-11);
  }
}

TEST_CASE("a score of the indexer that is not a number names its layer", "[sparse]") {
  TestModel m(sparse_config(), two_documents());
  Pool::set(m.store.value(m.id("model.layers.1.self_attn.indexer.bias")), 2, NAN);
  CHECK_THROWS_WITH(
      m.loss(), Catch::Contains("model.layers.1.self_attn.indexer: a score of the indexer is not a number"));
}

TEST_CASE("FLOPs of a sparse layer are of the selected pairs and of the indexer", "[sparse]") {
  ModelConfig c = sparse_config(3);
  c.num_hidden_layers = 1;
  c.attention.sparse.loss.coefficient = 1;
  ParamStore a, b, without;
  ModelConfig dense = c, idle = c;
  dense.attention.kind = AttentionKind::softmax;
  idle.attention.sparse.loss.coefficient = 0;
  const Transformer sparse(c, a), softmax(dense, b), untaught(idle, without);
  const Flops x = sparse.flops(8), y = softmax.flops(8);
  // Pairs of 8 tokens with 3 keys at most: 1 + 2 + 6 x 3 = 21; candidates: 36.
  const double pairs = 21.0 / 8, candidates = 36.0 / 8, width = 2.0 * 4 * 6;
  CHECK(y.activations == 4.0 * 4 * 4 * 4);
  CHECK(x.activations == Approx(4.0 * pairs * 4 * 4 + width * pairs));
  CHECK(x.forward_only == Approx(width * (candidates - pairs)));
  CHECK(x.frozen == Approx(2.0 * 6 * (4 * 6 + 6 + 4)));  // without a gradient of its input
  CHECK(x.trained == y.trained);
  // Without a loss nothing of the indexer is differentiated.
  const Flops z = untaught.flops(8);
  CHECK(z.activations == Approx(4.0 * pairs * 4 * 4));
  CHECK(z.forward() == Approx(x.forward()));
  CHECK(z.backward() == Approx(2 * y.trained + 2 * z.activations));
}

}  // namespace sluice
