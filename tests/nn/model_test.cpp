#include "support/model.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <limits>

#include "core/targets.h"
#include "ops/elementwise.h"
#include "optim/optimizer.h"

namespace sluice {
namespace {

using test::Pool;
using test::relative_error;
using test::TestModel;

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

void fill_with(const Tensor& t, double value) {
  for (int64_t i = 0; i < t.numel(); ++i) Pool::set(t, i, value);
}

constexpr double kSoftCap = 1.5;

/// nanochat's choices, all together.
void make_nanochat(ModelConfig& c) {
  c.hidden_act = HiddenAct::relu2;
  c.norm_weights = false;
  c.qk_norm_order = QkNormOrder::after_rope;
  c.embedding_norm = true;
  c.tie_word_embeddings = false;
  c.final_logit_softcapping = kSoftCap;
}

ModelConfig gated(GateGranularity granularity = GateGranularity::elementwise) {
  ModelConfig c = test::tiny_config();
  c.num_hidden_layers = 2;
  GateConfig g;
  g.granularity = granularity;
  c.attention.gates = {g};
  return c;
}

}  // namespace

TEST_CASE("recomputing activations changes no bit of any gradient", "[recompute]") {
  ModelConfig c = gated();
  if (GENERATE(false, true)) make_nanochat(c);
  c.num_hidden_layers = 3;
  c.attention.kind = AttentionKind::sink;
  c.norm_placement = NormPlacement::sandwich;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    TestModel none(c, test::tiny_batch(), dtype), mlp(c, test::tiny_batch(), dtype, Recompute::mlp),
        block(c, test::tiny_batch(), dtype, Recompute::block);
    const double loss = none.loss_and_gradient();
    CHECK(mlp.loss_and_gradient() == loss);
    CHECK(block.loss_and_gradient() == loss);
    const auto bytes = static_cast<size_t>(none.store.flat_grads().bytes());
    CHECK(std::memcmp(none.store.flat_grads().data, mlp.store.flat_grads().data, bytes) == 0);
    CHECK(std::memcmp(none.store.flat_grads().data, block.store.flat_grads().data, bytes) == 0);
    CHECK(mlp.activations->capacity() < none.activations->capacity());
    CHECK(block.activations->capacity() < mlp.activations->capacity());
  }
}

TEST_CASE("recomputed layers with and without window or experts share activations in any order",
          "[recompute][window]") {
  ModelConfig c = gated();
  c.num_hidden_layers = 6;
  c.attention.window = 2;
  c.attention.window_pattern = 2;  // layers 0, 2 and 4
  c.moe.num_experts = 4;
  c.moe.num_experts_per_tok = 2;
  c.moe.moe_intermediate_size = 4;
  const std::vector<std::vector<int64_t>> dense_layers = {{}, {0}, {1}, {0, 2}, {0, 1, 4}};
  for (const auto& dense : dense_layers) {
    c.moe.mlp_only_layers = dense;
    INFO(dense.size() << " dense layers");
    TestModel none(c, test::tiny_batch(), DType::f32),
        block(c, test::tiny_batch(), DType::f32, Recompute::block);
    CHECK(block.loss_and_gradient() == none.loss_and_gradient());
    CHECK(std::memcmp(none.store.flat_grads().data, block.store.flat_grads().data,
                      static_cast<size_t>(none.store.flat_grads().bytes())) == 0);
    CHECK(block.activations->capacity() < none.activations->capacity());
  }
}

TEST_CASE("gradients of two micro-batches accumulate", "[accumulation]") {
  TestModel m(gated(), test::tiny_batch());
  m.randomize();
  m.loss_and_gradient();
  Pool pool;
  const Tensor once = pool.copy(m.store.flat_grads(), DType::f64);
  const Batch b = m.batch.view();
  m.model.forward(*m.context, b, m.saved);
  double sixth = 1.0 / 6;
  m.model.loss_forward_backward(*m.context, m.losses, m.dhidden, b, m.saved, test::scalar(sixth));
  m.model.backward(*m.context, m.dhidden, b, m.saved);
  for (int64_t i = 0; i < once.numel(); ++i) Pool::set(once, i, 2 * Pool::get(once, i));
  CHECK(relative_error(m.store.flat_grads(), once) < 1e-14);
}

TEST_CASE("open gates equal the baseline: logits of +inf, sigmoid and ns_sigmoid", "[equivalence]") {
  for (const GateActivation activation : {GateActivation::sigmoid, GateActivation::ns_sigmoid})
    for (size_t p = 0; p < EnumNames<GatePosition>::names.size(); ++p) {
      ModelConfig plain = gated(), open = gated();
      plain.attention.gates.clear();
      GateConfig& g = open.attention.gates[0];
      g.position = static_cast<GatePosition>(p);
      g.input = GateInput::none;
      g.activation = activation;
      TestModel a(plain, test::tiny_batch()), b(open, test::tiny_batch());
      a.randomize();
      b.copy_from(a);
      for (size_t i = 0; i < b.store.specs().size(); ++i)
        if (b.store.specs()[i].name.find("gate.weight") != std::string::npos)
          fill_with(b.store.value(static_cast<ParamStore::Id>(i)), std::numeric_limits<double>::infinity());
      CHECK(a.logits() == b.logits());
    }
}

TEST_CASE("a headwise gate equals an elementwise one with repeated rows", "[equivalence]") {
  TestModel head(gated(GateGranularity::headwise), test::tiny_batch()), element(gated(), test::tiny_batch());
  head.randomize();
  element.copy_from(head);
  const ModelConfig& c = head.model.config();
  for (const char* layer : {"model.layers.0", "model.layers.1"}) {
    const std::string name = std::string(layer) + ".self_attn.gate_proj.weight";
    const Tensor from = head.store.value(head.id(name)), to = element.store.value(element.id(name));
    REQUIRE(from.has_shape({c.num_attention_heads, c.hidden_size}));
    REQUIRE(to.has_shape({c.num_attention_heads * c.head_dim, c.hidden_size}));
    for (int64_t i = 0; i < to.numel(); ++i) {
      const int64_t row = i / c.hidden_size, column = i % c.hidden_size;
      Pool::set(to, i, Pool::get(from, row / c.head_dim * c.hidden_size + column));
    }
  }
  CHECK(largest_difference(head.logits(), element.logits()) < 1e-13);
}

TEST_CASE("a sink logit of minus infinity gives softmax, of plus infinity zero output", "[equivalence]") {
  ModelConfig plain = test::tiny_config(), sink = plain;
  sink.attention.kind = AttentionKind::sink;
  TestModel a(plain, test::tiny_batch()), b(sink, test::tiny_batch());
  a.randomize();
  b.copy_from(a);
  const Tensor sinks = b.store.value(b.id("model.layers.0.self_attn.sinks"));
  fill_with(sinks, -std::numeric_limits<double>::infinity());
  CHECK(a.logits() == b.logits());
  fill_with(sinks, std::numeric_limits<double>::infinity());
  b.loss();
  const Tensor y = b.saved.blocks[0].attention.y;
  for (int64_t i = 0; i < y.numel(); ++i) REQUIRE(Pool::get(y, i) == 0.0);
}

TEST_CASE("behind a forward every block's output is there: the norm that reads it has made the sum", "[nn]") {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    TestModel m(test::tiny_config(), test::tiny_batch(), dtype);
    m.randomize();
    m.loss();
    Pool pool;
    for (const Block::Saved& s : m.saved.blocks) {
      const Tensor sum = pool.zeros(dtype, {s.y.dim(0), s.y.dim(1)});
      add_forward(*m.context, sum, s.x1, s.ffn_out.y);
      CHECK(std::memcmp(sum.data, s.y.data, static_cast<size_t>(sum.numel() * dtype_size(dtype))) == 0);
    }
  }
}

TEST_CASE("lse and z0 give each head's attention on the first visible token", "[analysis]") {
  TestModel m(test::tiny_config(), test::tiny_batch());
  m.randomize();
  m.loss();
  const Attention::Saved& s = m.saved.blocks[0].attention;
  const ModelConfig& c = m.model.config();
  const int64_t T = m.batch.size(), H = c.num_attention_heads, Hkv = c.num_key_value_heads, D = c.head_dim;
  for (int64_t h = 0; h < H; ++h)
    for (int64_t t = 0; t < T; ++t) {
      const int64_t first = m.batch.first_key[static_cast<size_t>(t)];
      double total = 0, of_first = 0;
      for (int64_t j = first; j <= t; ++j) {
        double z = 0;
        for (int64_t d = 0; d < D; ++d)
          z += Pool::get(s.q_position.y, (t * H + h) * D + d) *
               Pool::get(s.k_position.y, (j * Hkv + h / (H / Hkv)) * D + d);
        const double e = std::exp(z / std::sqrt(static_cast<double>(D)));
        total += e;
        if (j == first) of_first = e;
      }
      const double streamed = std::exp(Pool::get(s.core.z0, h * T + t) - Pool::get(s.core.lse, h * T + t));
      REQUIRE(streamed == Approx(of_first / total).epsilon(1e-12));
    }
}

TEST_CASE("values of first tokens are zeroed for all heads, or for those with most attention on them",
          "[zeroing]") {
  const test::OneThread one_thread;
  for (const AttentionKind kind : {AttentionKind::softmax, AttentionKind::sink})
    for (const bool gated : {false, true})
      for (const DType dtype : {DType::f64, DType::bf16}) {
        ModelConfig c = test::tiny_config();
        c.attention.kind = kind;
        if (gated) c.attention.gates = {GateConfig{}};
        test::TokenBatch batch = test::tiny_batch();
        batch.targets.back() = kPadding;
        TestModel m(c, batch, dtype);
        m.randomize();
        const Batch b = m.batch.view();
        Context ctx(1 << 20);
        const int64_t T = b.tokens.dim(0), H = 4, D = 4, kSecond = 4;  // where the second sequence starts
        const auto sequence_of = [](int64_t t) { return t < kSecond ? 0 : 1; };
        const auto forward = [&](const ValueZeroing* zeroing) {
          m.model.forward(ctx, b, m.saved, {}, nullptr, zeroing);
          std::vector<double> all;
          const Attention::Saved& a = m.saved.blocks[0].attention;
          for (const Tensor& t : {a.core.o, a.gates[GatePosition::sdpa_output].y})
            for (int64_t i = 0; i < t.numel(); ++i) all.push_back(Pool::get(t, i));
          return all;
        };
        const ValueZeroing all_heads, none{1.0};
        const std::vector<double> plain = forward(nullptr), zeroed = forward(&all_heads);
        const Attention::Saved& a = m.saved.blocks[0].attention;
        // O - A_t,first v_first, followed by sink and gate as for any output.
        std::vector<double> look(2 * H, 0.0);  // of each sequence and head, mean attention on the first token
        const Tensor sinks = m.model.blocks()[0].attention().softmax()->sinks();
        double worst = 0, size = 0;
        for (int64_t t = 0; t < T; ++t)
          for (int64_t h = 0; h < H; ++h) {
            const double lse = Pool::get(a.core.lse, h * T + t),
                         first = std::exp(Pool::get(a.core.z0, h * T + t) - lse);
            if (t + 1 < T)  // the last token is padding
              look[static_cast<size_t>(sequence_of(t) * H + h)] +=
                  first * (sinks ? 1 / (1 + std::exp(Pool::get(sinks, h) - lse)) : 1) /
                  static_cast<double>(t < kSecond ? kSecond : T - 1 - kSecond);
            for (int64_t d = 0; d < D; ++d) {
              const auto i = static_cast<size_t>((t * H + h) * D + d);
              const double v = Pool::get(a.v.y, (b.first_key.as<int32_t>()[t] * 2 + h / 2) * D + d);
              worst = std::max(worst, std::abs(plain[i] - first * v - zeroed[i]));
              size = std::max(size, std::abs(plain[i]));
              const double y = plain[plain.size() / 2 + i] / plain[i], yz = zeroed[zeroed.size() / 2 + i];
              if (dtype == DType::f64) CHECK(yz == Approx(y * zeroed[i]).margin(1e-12));
            }
          }
        CHECK(size > 0.1);
        CHECK(worst <= (dtype == DType::f64 ? 1e-12 : 2e-2));
        CHECK(forward(&none) == plain);
        std::vector<double> sorted = look;
        std::sort(sorted.begin(), sorted.end());
        const ValueZeroing half{(sorted[3] + sorted[4]) / 2};
        const std::vector<double> some = forward(&half);
        for (int64_t i = 0; i < std::ssize(some); ++i) {
          const int64_t t = i / (H * D) % T, h = i / D % H;
          const auto at = static_cast<size_t>(i);
          const bool taken = look[static_cast<size_t>(sequence_of(t) * H + h)] > *half.sinks_above;
          CHECK(some[at] == (taken ? zeroed : plain)[at]);
        }
      }
}

TEST_CASE("packed documents have the losses of separate ones", "[documents]") {
  ModelConfig c = gated();
  c.attention.kind = AttentionKind::sink;
  const std::vector<std::vector<int32_t>> documents = {
      test::random_tokens(9, 11, 1), test::random_tokens(3, 11, 2), test::random_tokens(14, 11, 3)};
  test::TokenBatch together;
  for (const auto& d : documents) together.add(d);
  TestModel packed(c, together);
  packed.randomize();
  packed.loss();
  int64_t offset = 0;
  for (const auto& d : documents) {
    test::TokenBatch alone;
    alone.add(d);
    TestModel m(c, alone);
    m.copy_from(packed);
    m.loss();
    for (int64_t i = 0; i < alone.size(); ++i)
      REQUIRE(Pool::get(m.losses, i) == Approx(Pool::get(packed.losses, offset + i)).epsilon(1e-12));
    offset += alone.size();
  }
  // The mask has an effect: with one long document the later tokens' losses change.
  std::fill(together.first_key.begin(), together.first_key.end(), 0);
  TestModel blended(c, together);
  blended.copy_from(packed);
  blended.loss();
  CHECK(std::abs(Pool::get(blended.losses, offset - 1) - Pool::get(packed.losses, offset - 1)) > 1e-6);
}

TEST_CASE("generation with a KV cache gives the logits of the full forward pass", "[cache]") {
  ModelConfig c = gated();
  const bool nanochat = GENERATE(false, true);
  if (nanochat) make_nanochat(c);
  c.attention.kind = AttentionKind::sink;
  for (const GatePosition position : {GatePosition::query, GatePosition::key, GatePosition::value}) {
    GateConfig g;
    g.position = position;
    c.attention.gates.push_back(g);
  }
  for (const auto& [dtype, tolerance] : {std::pair{DType::f64, 1e-12}, std::pair{DType::f32, 1e-5}}) {
    test::TokenBatch all;
    all.add(test::random_tokens(13, c.vocab_size, 4));
    TestModel m(c, all, dtype);
    m.randomize();
    const std::vector<double> expected = m.logits();
    const double largest = largest_difference(expected, std::vector<double>(expected.size()));
    CHECK((largest <= kSoftCap) == nanochat);
    CHECK(largest > 0.8 * kSoftCap);  // in the nonlinear range of the cap

    Arena memory("generation", 1 << 20);
    KeyValueCache cache = m.model.make_cache(memory, 12, dtype);
    const int64_t V = c.vocab_size;
    for (int64_t begin = 0, count = 0; begin < 12; begin += count) {
      count = begin == 0 ? 5 : begin == 5 ? 3 : 1;  // a prompt, a longer piece, then one by one
      Transformer::Saved s = m.model.make_saved(memory, count, dtype, Recompute::none);
      const Batch b = all.view();
      const Batch part = {.tokens = b.tokens.rows(begin, count),
                          .targets = b.targets.rows(begin, count),
                          .positions = b.positions.rows(begin, count),
                          .first_key = b.first_key.rows(begin, count)};
      m.model.forward(*m.context, part, s, {}, &cache);
      CHECK(cache.length == begin + count);
      Pool pool;
      const Tensor out = pool.zeros(dtype, {count, V});
      m.model.logits(*m.context, out, s.hidden);
      for (int64_t i = 0; i < count * V; ++i)
        REQUIRE(std::abs(Pool::get(out, i) - expected[static_cast<size_t>(begin * V + i)]) < tolerance);
    }
    Transformer::Saved one = m.model.make_saved(memory, 1, dtype, Recompute::none);
    const Batch b = all.view();
    const Batch next = {.tokens = b.tokens.rows(0, 1),
                        .targets = b.targets.rows(0, 1),
                        .positions = b.positions.rows(0, 1),
                        .first_key = b.first_key.rows(0, 1)};
    CHECK_THROWS_WITH(m.model.forward(*m.context, next, one, {}, &cache),
                      Catch::Contains("the cache has room for 0"));
  }
}

TEST_CASE("several sequences with caches of their own advance together", "[cache]") {
  ModelConfig c = gated();
  const bool experts = GENERATE(false, true);
  if (experts) {
    c.moe.num_experts = 3;
    c.moe.num_experts_per_tok = 2;
    c.moe.moe_intermediate_size = 4;
  }
  c.attention.kind = GENERATE(AttentionKind::sink, AttentionKind::off_by_one, AttentionKind::kv_bias,
                              AttentionKind::softpick);
  c.attention.window = GENERATE(0, 3);
  for (const GatePosition position : {GatePosition::key, GatePosition::value, GatePosition::dense_output}) {
    GateConfig g;
    g.position = position;
    c.attention.gates.push_back(g);
  }
  test::TokenBatch all;
  all.add(test::random_tokens(13, c.vocab_size, 4));
  TestModel m(c, all, DType::f64);
  m.randomize();
  const std::vector<double> expected = m.logits();
  const int64_t V = c.vocab_size;
  const Batch b = all.view();
  const auto part = [&](int64_t begin, int64_t count) {
    return Batch{.tokens = b.tokens.rows(begin, count),
                 .targets = b.targets.rows(begin, count),
                 .positions = b.positions.rows(begin, count),
                 .first_key = b.first_key.rows(begin, count)};
  };
  // Three sequences are the same text, cut after 2, 7 and 4 tokens.
  Arena memory("generation", 1 << 20);
  std::vector<KeyValueCache> caches;
  for (const int64_t length : {2, 7, 4}) {
    caches.push_back(m.model.make_cache(memory, 12, DType::f64));
    Transformer::Saved s = m.model.make_saved(memory, length, DType::f64, Recompute::block);
    m.model.forward(*m.context, part(0, length), s, {}, &caches.back());
  }
  std::vector<KeyValueCache*> of_row = {&caches[0], &caches[1], &caches[2]};
  Transformer::Saved s = m.model.make_saved(memory, 3, DType::f64, Recompute::block);
  for (int step = 0; step < 5; ++step) {
    std::rotate(of_row.begin(), of_row.begin() + 1, of_row.end());
    test::TokenBatch next;
    std::vector<int64_t> at;
    for (const KeyValueCache* cache : of_row) {
      at.push_back(cache->length);
      next.tokens.push_back(all.tokens[static_cast<size_t>(cache->length)]);
      next.targets.push_back(-1);
      next.positions.push_back(static_cast<int32_t>(cache->length));
      next.first_key.push_back(0);
    }
    m.model.forward_each(*m.context, next.view(), s, of_row);
    Pool pool;
    const Tensor out = pool.zeros(DType::f64, {3, V});
    m.model.logits(*m.context, out, s.hidden);
    for (int64_t row = 0; row < 3; ++row) {
      CHECK(of_row[static_cast<size_t>(row)]->length == at[static_cast<size_t>(row)] + 1);
      for (int64_t i = 0; i < V; ++i)
        REQUIRE(Pool::get(out, row * V + i) ==
                Approx(expected[static_cast<size_t>(at[static_cast<size_t>(row)] * V + i)]).margin(1e-12));
    }
  }
  CHECK_THROWS_WITH(m.model.forward_each(*m.context, part(0, 3), s, std::span(of_row).first(2)),
                    Catch::Contains("3 tokens and 2 caches"));
}

TEST_CASE("f32 and bf16 gradients are close to those of f64", "[precision]") {
  ModelConfig c = gated();
  c.hidden_size = 64;
  c.head_dim = 16;
  c.intermediate_size = 96;
  c.initializer_range = 0.08;
  test::TokenBatch batch;
  batch.add(test::random_tokens(33, 11, 1));
  TestModel bf16_model(c, batch, DType::bf16), f32_model(c, batch, DType::f32),
      f64_model(c, batch, DType::f64);
  f32_model.copy_from(bf16_model);  // values bf16 can hold
  f64_model.copy_from(bf16_model);
  const double exact = f64_model.loss_and_gradient();
  CHECK(f32_model.loss_and_gradient() == Approx(exact).epsilon(1e-6));
  CHECK(bf16_model.loss_and_gradient() == Approx(exact).epsilon(1e-2));
  CHECK(relative_error(f32_model.store.flat_grads(), f64_model.store.flat_grads()) < 1e-5);
  for (size_t i = 0; i < f64_model.store.specs().size(); ++i) {
    const auto id = static_cast<ParamStore::Id>(i);
    INFO(f64_model.store.specs()[i].name);
    CHECK(relative_error(bf16_model.store.grad(id), f64_model.store.grad(id)) < 0.05);
  }
}

TEST_CASE("every attention kind and gate position overfits one batch, in f32 and bf16", "[overfit]") {
  const test::OneThread one_thread;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (size_t p = 0; p < EnumNames<GatePosition>::names.size(); ++p) {
      ModelConfig c = gated();
      c.vocab_size = 32;
      c.hidden_size = 32;
      c.head_dim = 8;
      c.intermediate_size = 64;
      c.initializer_range = 0.1;
      c.attention.kind = p % 2 ? AttentionKind::sink : AttentionKind::softmax;
      c.attention.gates[0].position = static_cast<GatePosition>(p);
      test::TokenBatch batch;
      batch.add(test::random_tokens(33, c.vocab_size, 1));
      batch.add(test::random_tokens(33, c.vocab_size, 2));
      TestModel m(c, batch, dtype);
      OptimizerConfig oc;
      oc.weight_decay = 0;
      Optimizer optimizer(oc, m.store);
      Arena measure("optimizer");
      optimizer.allocate(*m.context, measure);
      Arena memory("optimizer", measure.high_water());
      optimizer.allocate(*m.context, memory);
      optimizer.sync_master(*m.context);
      const double first = m.loss();
      CHECK(first > 3.0);
      double loss = first;
      int step = 0;
      for (; step < 300 && loss >= 0.01; ++step) {
        loss = m.loss_and_gradient();
        optimizer.step(*m.context, 1e-2 * (1.0 - step / 320.0), 1.0);
      }
      INFO(dtype_name(dtype) << ", gate " << EnumNames<GatePosition>::names[p] << ", " << step << " steps");
      CHECK(loss < 0.01);
    }
}

TEST_CASE("parameters have Hugging Face names, and only matrices have weight decay", "[names]") {
  ModelConfig c = test::tiny_config();
  c.tie_word_embeddings = false;
  c.norm_placement = NormPlacement::sandwich;
  c.attention.kind = AttentionKind::sink;
  c.attention.output_norm = OutputNorm::rmsnorm;
  GateConfig value, constant;
  value.position = GatePosition::value;
  constant.input = GateInput::none;
  c.attention.gates = {GateConfig{}, value, GateConfig{}, constant};
  ParamStore store;
  const Transformer model(c, store);
  const std::string layer = "model.layers.0.";
  struct Expected {
    std::string name;
    std::vector<int64_t> shape;
    bool decays;
  };
  const std::vector<Expected> expected = {
      {"model.embed_tokens.weight", {11, 6}, true},
      {layer + "input_layernorm.weight", {6}, false},
      {layer + "self_attn.q_proj.weight", {16, 6}, true},
      {layer + "self_attn.k_proj.weight", {8, 6}, true},
      {layer + "self_attn.v_proj.weight", {8, 6}, true},
      {layer + "self_attn.gate_proj.weight", {16, 6}, true},
      {layer + "self_attn.value_gate_proj.weight", {8, 6}, true},
      {layer + "self_attn.gate_proj_2.weight", {16, 6}, true},
      {layer + "self_attn.gate_3.weight", {4, 4}, false},
      {layer + "self_attn.o_proj.weight", {6, 16}, true},
      {layer + "self_attn.q_norm.weight", {4}, false},
      {layer + "self_attn.k_norm.weight", {4}, false},
      {layer + "self_attn.sinks", {4}, false},
      {layer + "self_attn.o_norm.weight", {4, 4}, false},
      {layer + "post_attention_branch_layernorm.weight", {6}, false},
      {layer + "post_attention_layernorm.weight", {6}, false},
      {layer + "mlp.gate_proj.weight", {5, 6}, true},
      {layer + "mlp.up_proj.weight", {5, 6}, true},
      {layer + "mlp.down_proj.weight", {6, 5}, true},
      {layer + "post_mlp_branch_layernorm.weight", {6}, false},
      {"model.norm.weight", {6}, false},
      {"lm_head.weight", {11, 6}, true},
  };
  REQUIRE(store.specs().size() == expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(store.specs()[i].name == expected[i].name);
    CHECK(store.specs()[i].shape == expected[i].shape);
    CHECK(store.specs()[i].weight_decay == expected[i].decays);
  }
}

TEST_CASE("the paper's parameter counts", "[counts]") {
  // Qwen3-1.7B geometry, and the parameters that table 1 (Qiu et al. 2025) adds at the 15A2B's scale.
  ModelConfig c;
  c.vocab_size = 151936;
  c.hidden_size = 2048;
  c.num_hidden_layers = 28;
  c.num_attention_heads = 16;
  c.num_key_value_heads = 8;
  c.head_dim = 128;
  c.intermediate_size = 6144;
  const auto total = [](const ModelConfig& config) {
    ParamStore store;
    const Transformer model(config, store);
    return store.total();
  };
  CHECK(total(c) == 1720574976);

  c.num_hidden_layers = 24;
  c.num_attention_heads = 32;
  c.num_key_value_heads = 4;
  const int64_t base = total(c);
  const auto added = [&](GatePosition position, GateGranularity granularity, GateSharing heads) {
    ModelConfig g = c;
    g.attention.gates = {
        {position, granularity, heads, GateCombine::multiply, GateActivation::sigmoid, GateInput::hidden}};
    return total(g) - base;
  };
  const auto elementwise = GateGranularity::elementwise;
  const auto headwise = GateGranularity::headwise;
  CHECK(added(GatePosition::sdpa_output, elementwise, GateSharing::specific) == 201326592);
  CHECK(added(GatePosition::sdpa_output, elementwise, GateSharing::shared) == 201326592);
  CHECK(added(GatePosition::query, elementwise, GateSharing::specific) == 201326592);
  CHECK(added(GatePosition::key, elementwise, GateSharing::specific) == 25165824);
  CHECK(added(GatePosition::value, elementwise, GateSharing::specific) == 25165824);
  CHECK(added(GatePosition::dense_output, elementwise, GateSharing::specific) == 100663296);
  CHECK(added(GatePosition::sdpa_output, headwise, GateSharing::specific) == 1572864);
  CHECK(added(GatePosition::value, headwise, GateSharing::specific) == 196608);
}

TEST_CASE("impossible layers are refused by name", "[contract]") {
  const auto build = [](const ModelConfig& c) {
    ParamStore store;
    const Transformer model(c, store);
  };
  ModelConfig c = test::tiny_config();
  c.num_attention_heads = 3;
  CHECK_THROWS_WITH(build(c), Catch::Contains("3 heads over 2 key/value heads"));
  c = test::tiny_config();
  c.head_dim = 5;
  CHECK_THROWS_WITH(build(c), Catch::Contains("head_dim must be even"));
  c = test::tiny_config();
  c.attention.gates = {GateConfig{}};
  c.attention.gates[0].position = GatePosition::dense_output;
  c.attention.gates[0].granularity = GateGranularity::headwise;
  CHECK_THROWS_WITH(build(c), Catch::Contains("dense_output"));
  c = test::tiny_config();
  c.vocab_size = 0;
  CHECK_THROWS_WITH(build(c), Catch::Contains("vocab_size"));
}

}  // namespace sluice
