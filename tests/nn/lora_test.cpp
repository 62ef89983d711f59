// Low-rank adapters inside the model.
#include <catch2/catch.hpp>

#include "optim/optimizer.h"
#include "support/enums.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::Pool;
using test::TestModel;

const LoraConfig kAll{.rank = 3, .alpha = 5};

/// Two layers with all kinds of matrices: gates, switch heads, joined projections.
ModelConfig config() {
  ModelConfig c = test::tiny_config();
  c.num_hidden_layers = 2;
  GateConfig values;
  values.position = GatePosition::value;
  c.attention.gates = {GateConfig{.input_channels = 4, .bias = 0.5}, values};
  c.gated_norm.rank = 2;
  c.attention.kind = AttentionKind::sink;
  return c;
}

/// W + (alpha / rank) B A of every adapter, into `plain`, which has the other parameters of `m`.
void merge(TestModel& plain, const TestModel& m, const LoraConfig& lora) {
  plain.copy_from(m);
  for (size_t i = 0; i < m.store.specs().size(); ++i)
    for (const ParamStore::Adapter& adapter : m.store.adapters(static_cast<ParamStore::Id>(i))) {
      const Tensor a = m.store.value(adapter.a), b = m.store.value(adapter.b);
      const Tensor w = plain.store.value(plain.id(m.store.specs()[static_cast<size_t>(adapter.matrix)].name));
      for (int64_t row = 0; row < w.dim(0); ++row)
        for (int64_t column = 0; column < w.dim(1); ++column) {
          double change = 0;
          for (int64_t r = 0; r < lora.rank; ++r)
            change += Pool::get(b, row * lora.rank + r) * Pool::get(a, r * w.dim(1) + column);
          const int64_t at = row * w.dim(1) + column;
          Pool::set(w, at, Pool::get(w, at) + lora.alpha / static_cast<double>(lora.rank) * change);
        }
    }
}

}  // namespace

TEST_CASE("gradients of adapters equal central differences; nothing else has gradients", "[gradient][lora]") {
  const test::OneThread one_thread;
  test::for_each_value<Recompute>([&](Recompute recompute) {
    ModelConfig c = config();
    if (recompute == Recompute::mlp)
      c.attention.switch_heads = {.num_experts = 4, .num_experts_per_tok = 2, .expert_width = 2};
    LoraConfig lora = kAll;
    if (recompute == Recompute::mlp) lora.targets.push_back("v_switch");
    if (recompute == Recompute::block)
      lora.targets = {"up_proj", "self_attn.gate_proj"};  // one of a joined group
    TestModel m(c, test::tiny_batch(), DType::f64, recompute, {}, lora);
    m.randomize();
    m.loss_and_gradient();
    int64_t trained = 0;
    for (size_t i = 0; i < m.store.specs().size(); ++i) {
      const auto id = static_cast<ParamStore::Id>(i);
      const std::string& name = m.store.specs()[i].name;
      CHECK(m.store.trains(id) == (name.find(".lora_") != std::string::npos));
      if (!m.store.trains(id)) continue;
      INFO(name);
      trained += m.store.numel(id);
      CHECK(test::gradient_error(
                m.store.value(id), m.store.grad(id), [&] { return m.loss(); }, 4, 2e-6) <= 1e-7);
    }
    CHECK(trained == m.store.total_trained());
    // All gradients that exist: those, and the largest of the few that are discarded.
    CHECK(m.store.flat_grads().numel() < trained + 32 * 64);
  });
}

TEST_CASE("adapters with B = 0 change nothing, and merging preserves the outputs", "[equivalence][lora]") {
  LoraConfig lora = kAll;
  lora.targets.push_back("value_gate_proj");
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    TestModel m(config(), test::tiny_batch(), dtype, Recompute::none, {}, lora),
        plain(config(), test::tiny_batch(), dtype);
    CHECK(m.logits() == plain.logits());  // the same names have the same initial values
    CHECK(m.store.total() == plain.store.total() + m.store.total_trained());
  }
  TestModel m(config(), test::tiny_batch(), DType::f64, Recompute::none, {}, lora),
      merged(config(), test::tiny_batch());
  m.randomize();
  merge(merged, m, lora);
  const std::vector<double> a = m.logits(), b = merged.logits();
  for (size_t i = 0; i < a.size(); ++i) REQUIRE(a[i] == Approx(b[i]).epsilon(1e-11));
}

TEST_CASE("adapters of the shared expert and of attention beside frozen experts", "[gradient][lora][moe]") {
  const test::OneThread one_thread;
  ModelConfig c = test::tiny_config();
  c.moe.num_experts = 5;
  c.moe.num_experts_per_tok = 2;
  c.moe.moe_intermediate_size = 3;
  c.moe.shared_expert_intermediate_size = 4;
  c.moe.shared_expert_gate = true;
  c.moe.load_balance.coefficient = c.moe.router_z_loss_coefficient = 0;
  const LoraConfig lora{
      .rank = 2, .alpha = 3, .targets = {"q_proj", "shared_expert.up_proj", "shared_expert_gate"}};
  TestModel m(c, test::tiny_batch(), DType::f64, Recompute::none, {}, lora);
  m.randomize();
  m.loss_and_gradient();
  int adapters = 0;
  for (size_t i = 0; i < m.store.specs().size(); ++i) {
    const auto id = static_cast<ParamStore::Id>(i);
    if (!m.store.trains(id)) continue;
    INFO(m.store.specs()[i].name);
    ++adapters;
    CHECK(test::gradient_error(
              m.store.value(id), m.store.grad(id), [&] { return m.loss(); }, 4, 1e-6) <= 1e-7);
  }
  CHECK(adapters == 6);
}

TEST_CASE("adapters are initialised and named as in PEFT: A with variance 1 / (3 in), B zero", "[lora]") {
  ModelConfig c = test::tiny_config();
  c.hidden_size = 300;
  TestModel m(c, test::tiny_batch(), DType::f64, Recompute::none, {}, {.rank = 40, .targets = {"q_proj"}});
  const Tensor a = m.store.value(m.id("model.layers.0.self_attn.q_proj.lora_A.weight")),
               b = m.store.value(m.id("model.layers.0.self_attn.q_proj.lora_B.weight"));
  REQUIRE(a.has_shape({40, 300}));
  REQUIRE(b.has_shape({16, 40}));
  double squares = 0;
  for (int64_t i = 0; i < a.numel(); ++i) squares += Pool::get(a, i) * Pool::get(a, i);
  CHECK(squares / static_cast<double>(a.numel()) == Approx(1.0 / 900).epsilon(0.05));
  for (int64_t i = 0; i < b.numel(); ++i) REQUIRE(Pool::get(b, i) == 0);
}

TEST_CASE("unsupported or unknown adapter targets are refused by name", "[lora]") {
  const auto message = [](const std::vector<std::string>& targets, bool experts) {
    return test::message_of([&] {
      ModelConfig c = test::tiny_config();
      c.moe.num_experts = experts ? 4 : 0;
      TestModel(c, test::tiny_batch(), DType::f64, Recompute::none, {}, {.rank = 2, .targets = targets});
    });
  };
  CHECK_THAT(message(LoraConfig().targets, true),
             Catch::Contains("lora.targets: model.layers.0.mlp.experts.0.gate_proj.weight is named"));
  CHECK_THAT(message({"q_proj", "gate"}, true), Catch::Contains("mlp.gate.weight is named"));
  CHECK_THAT(message({"q_proj", "lm_head"}, false),
             Catch::Contains("no matrix of this model is called lm_head"));  // tied
  CHECK_THAT(message({"q_proj", "input_layernorm"}, false),
             Catch::Contains("input_layernorm.weight is named"));
  CHECK_THAT(message({"proj"}, false), Catch::Contains("no matrix of this model is called proj"));
  // A rule for parameters that are not trained would have no effect.
  TestModel m(config(), test::tiny_batch(), DType::f64, Recompute::none, {}, kAll);
  OptimizerConfig rules;
  rules.rules.emplace_back().match = "norm";
  CHECK_THROWS_WITH(Optimizer(rules, m.store),
                    Catch::Contains("no trained parameter's name contains 'norm'"));
}

}  // namespace sluice
