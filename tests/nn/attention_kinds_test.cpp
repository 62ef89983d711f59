// Kinds of attention and sliding windows in a whole model: what equals what, generation with a cache, and
// random combinations of them with gates, norms, heads and documents.
#include <catch2/catch.hpp>
#include <random>
#include <set>

#include "config/validate.h"
#include "optim/optimizer.h"
#include "support/enums.h"
#include "support/layer_parts.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::kCount;
using test::name_of;
using test::Pool;
using test::TestModel;

/// The kinds that SoftmaxAttention computes: all but sparse.
template <class Body>
void for_each_kind(const Body& body) {
  test::for_each_value<AttentionKind>([&](AttentionKind kind) {
    if (kind != AttentionKind::sparse) body(kind);
  });
}

/// The gradients of all parameters that `store` shares with `other`, bit by bit.
bool same_gradients(const TestModel& a, const TestModel& b) {
  size_t compared = 0;
  for (size_t i = 0; i < a.store.specs().size(); ++i)
    for (size_t j = 0; j < b.store.specs().size(); ++j) {
      if (a.store.specs()[i].name != b.store.specs()[j].name) continue;
      if (!test::equal_bits(a.store.grad(static_cast<ParamStore::Id>(i)),
                            b.store.grad(static_cast<ParamStore::Id>(j))))
        return false;
      ++compared;
    }
  return compared == std::min(a.store.specs().size(), b.store.specs().size());
}

/// Two layers, a gate at attention's output, and balanced heads.
ModelConfig balanced(AttentionKind kind, bool gated) {
  ModelConfig c = test::tiny_config();
  c.num_hidden_layers = 2;
  c.attention.kind = kind;
  c.attention.head_balance.coefficient = 1;
  if (gated) c.attention.gates = {GateConfig{}};
  return c;
}

}  // namespace

TEST_CASE("off-by-one attention equals a learned sink that is frozen at 0, bit for bit", "[kinds]") {
  const test::OneThread one_thread;
  for (const bool gated : {false, true})
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
      TestModel sink(balanced(AttentionKind::sink, gated), test::tiny_batch(), dtype),
          off_by_one(balanced(AttentionKind::off_by_one, gated), test::tiny_batch(), dtype),
          plain(balanced(AttentionKind::softmax, gated), test::tiny_batch(), dtype);
      sink.randomize();
      for (const int layer : {0, 1})
        for (int64_t h = 0; h < 4; ++h)
          Pool::set(sink.store.value(sink.id(fmt::format("model.layers.{}.self_attn.sinks", layer))), h, 0);
      off_by_one.copy_from(sink);
      plain.copy_from(sink);
      CHECK(off_by_one.loss_and_gradient() == sink.loss_and_gradient());
      CHECK(same_gradients(off_by_one, sink));
      CHECK(plain.loss_and_gradient() != sink.loss_and_gradient());
    }
}

TEST_CASE("a window of the whole sequence equals none, bit for bit", "[kinds][window]") {
  const test::OneThread one_thread;
  for_each_kind([&](AttentionKind kind) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
      ModelConfig c = balanced(kind, false);
      TestModel none(c, test::tiny_batch(), dtype);
      none.randomize();
      const double loss = none.loss_and_gradient();
      for (const int64_t window : {4, 9, 1000, 3}) {  // the longer document has 4 tokens
        c.attention.window = window;
        TestModel m(c, test::tiny_batch(), dtype);
        m.copy_from(none);
        INFO(name_of(kind) << ", window " << window);
        CHECK((m.loss_and_gradient() == loss) == (window > 3));
        CHECK(same_gradients(m, none) == (window > 3));
      }
    }
  });
}

TEST_CASE("every window_pattern-th layer has no window", "[window]") {
  ModelConfig c = test::tiny_config();
  c.num_hidden_layers = 6;
  c.attention.window = 3;
  const auto windows = [&](int64_t pattern) {
    c.attention.window_pattern = pattern;
    ParamStore store;
    const Transformer model(c, store);
    std::vector<int64_t> of_layer;
    for (const Block& block : model.blocks()) of_layer.push_back(block.attention().softmax()->window());
    return of_layer;
  };
  CHECK(windows(0) == std::vector<int64_t>{3, 3, 3, 3, 3, 3});
  CHECK(windows(2) == std::vector<int64_t>{3, 0, 3, 0, 3, 0});
  CHECK(windows(6) == std::vector<int64_t>{3, 3, 3, 3, 3, 0});
}

TEST_CASE("generation with a KV cache equals the full forward pass for every kind and window",
          "[kinds][window][cache]") {
  for_each_kind([&](AttentionKind kind) {
    for (const int64_t window : {0, 1, 4}) {
      ModelConfig c = balanced(kind, kind != AttentionKind::kv_bias);
      c.attention.head_balance.coefficient = 0;
      c.attention.window = window;
      c.attention.window_pattern = window == 4 ? 2 : 0;
      test::TokenBatch all;
      all.add(test::random_tokens(13, c.vocab_size, 4));
      TestModel m(c, all);
      m.randomize();
      const std::vector<double> expected = m.logits();
      Arena memory("generation", 1 << 20);
      KeyValueCache cache = m.model.make_cache(memory, 12, DType::f64);
      const int64_t V = c.vocab_size;
      double worst = 0;
      for (int64_t begin = 0, count = 0; begin < 12; begin += count) {
        count = begin == 0 ? 5 : begin == 5 ? 3 : 1;  // a prompt, a longer piece, then one by one
        Transformer::Saved s = m.model.make_saved(memory, count, DType::f64, Recompute::none);
        const Batch b = all.view();
        const Batch part = {.tokens = b.tokens.rows(begin, count),
                            .targets = b.targets.rows(begin, count),
                            .positions = b.positions.rows(begin, count),
                            .first_key = b.first_key.rows(begin, count)};
        m.model.forward(*m.context, part, s, {}, &cache);
        Pool pool;
        const Tensor out = pool.zeros(DType::f64, {count, V});
        m.model.logits(*m.context, out, s.hidden);
        for (int64_t i = 0; i < count * V; ++i)
          worst = std::max(worst, std::abs(Pool::get(out, i) - expected[static_cast<size_t>(begin * V + i)]));
      }
      INFO(name_of(kind) << ", window " << window);
      CHECK(worst < 1e-12);
    }
  });
}

namespace {

struct Refusal : ProblemSink {
  std::string why;
  void operator()(const std::vector<std::string>&, const std::string& message) override { why = message; }
};

/// A random model. What it combines may be impossible, which validation must then say.
Config random_config(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Config c;
  c.name = "tiny";
  ModelConfig& m = c.model = test::tiny_config();
  c.data.tokenizer.type = TokenizerType::sentencepiece;  // of any vocabulary
  c.data.tokenizer.path = "tokenizer.model";
  c.data.seq_len = 8;
  m.num_hidden_layers = 1 + below(2);
  m.num_key_value_heads = 1 << below(3);
  m.qk_norm = below(3) != 0;
  m.qk_norm_order = static_cast<QkNormOrder>(below(2));
  m.norm_placement = static_cast<NormPlacement>(below(2));
  m.tie_word_embeddings = below(2) != 0;
  AttentionConfig& a = m.attention;
  a.kind = static_cast<AttentionKind>(below(kCount<AttentionKind> - 1));
  a.window = below(2) * (1 + below(5));
  a.window_pattern = below(3);
  a.output_norm = static_cast<OutputNorm>(below(6) % kCount<OutputNorm>);
  a.output_activation = static_cast<OutputActivation>(below(5) == 0);
  for (int i = below(3); i > 0; --i) {
    GateConfig g;
    g.position = static_cast<GatePosition>(below(kCount<GatePosition>));
    g.granularity = static_cast<GateGranularity>(below(2));
    g.heads = static_cast<GateSharing>(std::max(0, below(5) - 2));
    g.activation = static_cast<GateActivation>(below(kCount<GateActivation>));
    g.input = static_cast<GateInput>(below(4) == 0);
    a.gates.push_back(g);
  }
  a.head_balance.coefficient = below(2);
  a.head_balance.skip_first = below(2) != 0;
  if (below(4) == 0) a.switch_heads = {.num_experts = 3, .num_experts_per_tok = 1};
  return c;
}

std::string describe(const ModelConfig& m) {
  const AttentionConfig& a = m.attention;
  std::string text = fmt::format(
      "{}, window {} of pattern {}, {} layers, {} kv heads, qk_norm {} {}, output {} {}, balance {}",
      name_of(a.kind), a.window, a.window_pattern, m.num_hidden_layers, m.num_key_value_heads, m.qk_norm,
      name_of(m.qk_norm_order), name_of(a.output_norm), name_of(a.output_activation),
      a.head_balance.coefficient);
  for (const GateConfig& g : a.gates)
    text += fmt::format("; gate {} {} {} {} {}", name_of(g.position), name_of(g.granularity),
                        name_of(g.heads), name_of(g.activation), name_of(g.input));
  return text;
}

/// The largest gradient error over the parameters, at a few elements of each.
double worst_gradient(const ModelConfig& config) {
  TestModel m(config, test::tiny_batch());
  m.randomize();
  m.loss_and_gradient();
  double worst = 0;
  for (size_t i = 0; i < m.store.specs().size(); ++i) {
    const auto id = static_cast<ParamStore::Id>(i);
    const double error = test::gradient_error(
        m.store.value(id), m.store.grad(id), [&] { return m.loss(); }, 2, 1e-6);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

/// The change of the loss by one small step of training.
double change_by_a_step(const ModelConfig& config) {
  TestModel m(config, test::tiny_batch(), DType::f32);
  m.randomize();
  OptimizerConfig optimizer_config;
  optimizer_config.weight_decay = 0;
  Optimizer optimizer(optimizer_config, m.store);
  Arena measure("optimizer");
  optimizer.allocate(*m.context, measure);
  Arena memory("optimizer", measure.high_water());
  optimizer.allocate(*m.context, memory);
  optimizer.sync_master(*m.context);
  const double before = m.loss_and_gradient();
  optimizer.step(*m.context, 1e-4, 1.0);
  return m.loss() - before;
}

}  // namespace

TEST_CASE("random combinations of kinds, windows, gates, norms and heads: gradients, and a step of training",
          "[kinds][gradient]") {
  const test::OneThread one_thread;
  std::mt19937 random(20);
  int valid = 0, refused = 0;
  std::set<AttentionKind> kinds;
  std::string why;
  while (valid < 40 && refused < 1000) {
    const Config c = random_config(random);
    Refusal refusal;
    check_combinations(c, refusal);
    if (!refusal.why.empty()) {
      ++refused, why = refusal.why;
      continue;
    }
    ++valid;
    kinds.insert(c.model.attention.kind);
    INFO(describe(c.model));
    CHECK(worst_gradient(c.model) < 1e-6);
    CHECK(change_by_a_step(c.model) < 0);
  }
  INFO("the last refusal: " << why);
  CHECK(valid == 40);
  CHECK(refused > 0);
  CHECK(kinds.size() == static_cast<size_t>(kCount<AttentionKind> - 1));
}

}  // namespace sluice
