// Frozen parameters inside the model: what their gradients cost, and that the others' stay what they are.
#include <catch2/catch.hpp>
#include <cstring>

#include "optim/optimizer.h"
#include "support/model.h"

namespace sluice {
namespace {

using test::TestModel;

/// Experts and a dense layer, gates of both inputs, sinks, a norm before the head.
ModelConfig config(bool tied) {
  ModelConfig c = test::tiny_config();
  c.num_hidden_layers = 2;
  c.tie_word_embeddings = tied;
  c.attention.kind = AttentionKind::sink;
  GateConfig constant;
  constant.position = GatePosition::value;
  constant.input = GateInput::none;
  c.attention.gates = {GateConfig{}, constant};
  c.moe.num_experts = 4;
  c.moe.num_experts_per_tok = 2;
  c.moe.moe_intermediate_size = 6;
  c.moe.shared_expert_intermediate_size = 6;
  c.moe.mlp_only_layers = {0};
  return c;
}

ParameterRule rule(const char* match, bool trainable = false) {
  ParameterRule rule;
  rule.match = match;
  rule.trainable = trainable;
  return rule;
}

}  // namespace

TEST_CASE("freezing some parameters changes no bit of the other gradients", "[gradient][freeze]") {
  const test::OneThread one_thread;
  for (const bool tied : {true, false})
    for (const Recompute recompute : {Recompute::none, Recompute::mlp, Recompute::block}) {
      TestModel whole(config(tied), test::tiny_batch(), DType::f64, recompute);
      whole.randomize();
      whole.loss_and_gradient();
      for (const char* match : {"embed_tokens", "norm", "experts.", "mlp.", "layers.0.", "self_attn",
                                "q_proj", "gate", "sinks", "model."}) {
        INFO(match << (tied ? ", tied" : ""));
        // "gate" alone would cut gate_proj from up_proj, which are one matrix.
        std::vector<ParameterRule> rules = {rule(match)};
        if (std::string(match) == "gate") rules.push_back(rule(".mlp.", true));
        if (std::string(match) == "model.") rules.push_back(rule("k_proj", true));
        TestModel m(config(tied), test::tiny_batch(), DType::f64, recompute, {}, {}, rules);
        m.copy_from(whole);
        CHECK(m.loss_and_gradient() == whole.loss_and_gradient());
        int64_t frozen = 0, trained = 0;
        for (ParamStore::Id id = 0; id < static_cast<ParamStore::Id>(m.store.specs().size()); ++id) {
          const ParamSpec& spec = m.store.spec(id);
          INFO(spec.name);
          if (!spec.trainable) {
            ++frozen;
            continue;
          }
          trained += spec.numel();
          const Tensor a = m.store.grad(id), b = whole.store.grad(whole.id(spec.name));
          CHECK(std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes())) == 0);
        }
        CHECK(frozen > 0);
        CHECK(trained == m.store.total_trained());
        // No place for gradients but that of the largest which a layer cannot leave out.
        CHECK(m.store.flat_grads().numel() < whole.store.flat_grads().numel());
      }
    }
}

TEST_CASE("gradients through frozen parameters equal central differences", "[gradient][freeze]") {
  const test::OneThread one_thread;
  ModelConfig c = config(false);
  c.moe.load_balance.coefficient = c.moe.router_z_loss_coefficient = 0;  // they are no part of loss()
  TestModel m(c, test::tiny_batch(), DType::f64, Recompute::none, {}, {},
              {rule(""), rule("layers.0.self_attn", true), rule("q_proj")});
  m.randomize();
  m.loss_and_gradient();
  int checked = 0;
  for (ParamStore::Id id = 0; id < static_cast<ParamStore::Id>(m.store.specs().size()); ++id) {
    const std::string& name = m.store.spec(id).name;
    CHECK(m.store.trains(id) ==
          (name.find("layers.0.self_attn") != std::string::npos && name.find("q_proj") == std::string::npos));
    if (!m.store.trains(id)) continue;
    INFO(name);
    CHECK(test::gradient_error(
              m.store.value(id), m.store.grad(id), [&] { return m.loss(); }, 4, 2e-6) <= 1e-7);
    ++checked;
  }
  CHECK(checked >= 5);
}

TEST_CASE("rules that freeze nothing, everything, or half of a matrix are refused by name", "[freeze]") {
  const auto message = [](std::vector<ParameterRule> rules) -> std::string {
    try {
      ParamStore store({}, rules);
      const Transformer model(config(false), store);
      OptimizerConfig optimizer;
      optimizer.rules = std::move(rules);
      const Optimizer made(optimizer, store);
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::usage);
      return error.what();
    }
    return "";
  };
  CHECK(message({rule("embed_tokens"), rule("q_porj")}) ==
        "optimizer.rules[1]: no trained parameter's name contains 'q_porj'");
  CHECK_THAT(message({rule("")}), Catch::Contains("optimizer.rules freeze every parameter"));
  CHECK(message({rule(""), rule("sinks", true)}).empty());
  CHECK_THAT(
      message({rule("layers.0.mlp.up_proj")}),
      Catch::Contains("model.layers.0.mlp.gate_proj.weight is trained and "
                      "model.layers.0.mlp.up_proj.weight is frozen, but both are parts of one matrix"));
  CHECK_THAT(message({rule("experts.2.")}), Catch::Contains("freeze both or neither"));
  // A multiplier for what is frozen has no effect, and one that freezes has.
  ParameterRule faster = rule("q_proj", true);
  faster.lr_multiplier = 2;
  CHECK(message({faster, rule("self_attn")}) ==
        "optimizer.rules[0] has no effect: later rules decide for every parameter whose name contains "
        "'q_proj'; "
        "the last rule that matches a name decides");
  CHECK(message({rule("self_attn"), faster}).empty());
}

}  // namespace sluice
