// Every layer says its own floating-point operations; for dense causal attention their sum is the formula
// that the papers use.
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "config/load.h"
#include "nn/transformer.h"
#include "plan/plan.h"

using namespace sluice;

namespace {

/// Floating-point operations of a token, forward and backward, as one formula of the model's matrices: 6 for
/// each weight of a product (4 for a frozen one), and 6 L S H D for causal attention.
double one_formula(const Config& config) {
  ParamStore store(config.lora, config.optimizer.rules);
  const ModelConfig& m = config.model;
  const Transformer transformer(m, store);
  double weights = 0, frozen = 0;
  for (size_t i = 0; i < store.specs().size(); ++i) {
    const ParamSpec& spec = store.specs()[i];
    if (!spec.packed) continue;
    const double active = static_cast<double>(store.numel(static_cast<int>(i))) * spec.active;
    weights += active;
    if (!spec.trainable) frozen += active;
  }
  return 6.0 * std::round(weights) - 2.0 * std::round(frozen) +
         6.0 * static_cast<double>(m.num_hidden_layers * config.data.seq_len) *
             static_cast<double>(m.num_attention_heads * m.head_dim);
}

std::string shipped(const std::string& name) { return SLUICE_SOURCE_DIR "/configs/" + name; }

}  // namespace

TEST_CASE("the layers' FLOPs sum to the one formula of dense causal attention", "[plan][flops]") {
  const std::vector<std::string> lora = {"train.init_from=x", "lora.rank=8"};
  struct Case {
    std::string file;
    std::vector<std::string> overrides;
  };
  const std::vector<Case> cases = {
      {"quickstart/baseline.yaml", {}},
      {"quickstart/gated.yaml", {}},
      {"quickstart/gated.yaml", {"model.tie_word_embeddings=false", "model.hidden_act=relu2"}},
      {"quickstart/gated.yaml", lora},
      {"quickstart/gated.yaml", {"optimizer.rules=[{match: down_proj, trainable: false}]"}},
      {"quickstart/gated.yaml",
       {"model.attention.gates=[{position: value, granularity: headwise}, {input: none}, {position: "
        "dense_output}]"}},
      {"quickstart/gated.yaml", {"model.gated_norm.rank=8", "model.attention.exclusive=learned"}},
      {"quickstart/gated.yaml",
       {"model.attention.gates=[{position: value, input: self}, {input_channels: 12, bias: 1}]"}},
      {"quickstart/baseline.yaml",
       {"model.attention.switch_heads={num_experts: 4, num_experts_per_tok: 2, projections: key_value}"}},
      {"models/moe_small_20m.yaml", {}},
      {"models/moe_small_20m.yaml", {"model.moe.num_experts=6", "model.moe.num_experts_per_tok=5"}},
      {"models/moe_small_20m.yaml",
       {"model.moe.shared_expert_intermediate_size=48", "model.moe.shared_expert_gate=true",
        "model.moe.mlp_only_layers=[1]"}},
      {"models/moe_small_20m.yaml", {"train.init_from=x", "lora.rank=8", "lora.targets=[q_proj, o_proj]"}},
      {"gated_attention/table2_01_28l_baseline.yaml", {}},
      {"models/moe_15a2b_shared.yaml", {}},
  };
  for (const Case& c : cases) {
    INFO(c.file << (c.overrides.empty() ? "" : " " + c.overrides.front()));
    const Plan plan = make_plan(load_config(shipped(c.file), c.overrides));
    CHECK(plan.flops_per_token == one_formula(plan.config));
    CHECK(plan.flops_per_token == plan.flops.forward() + plan.flops.backward());
    CHECK((plan.flops.frozen > 0) == (plan.config.lora.rank > 0 || !plan.config.optimizer.rules.empty()));
  }
}

TEST_CASE("FLOPs of attention grow with the sequence, those of weights do not", "[plan][flops]") {
  const std::string file = shipped("quickstart/gated.yaml");
  const Flops base = make_plan(load_config(file, {"data.seq_len=128"})).flops;
  const Flops twice = make_plan(load_config(file, {"data.seq_len=256"})).flops;
  CHECK(twice.activations == 2 * base.activations);
  CHECK(twice.trained == base.trained);
}

TEST_CASE("a window costs the keys that it shows, and an extra key its own products",
          "[plan][flops][window]") {
  const std::string file = shipped("quickstart/baseline.yaml");
  const auto flops = [&](std::vector<std::string> overrides) {
    overrides.push_back("data.seq_len=128");
    return make_plan(load_config(file, overrides)).flops;
  };
  const Flops plain = flops({});
  CHECK(flops({"model.attention.window=128"}).activations == plain.activations);
  CHECK(flops({"model.attention.window=1000"}).activations == plain.activations);
  // Half of the causal triangle of 128 x 128 is 8192 pairs; a window of 32 leaves 32 x 128 - 32 x 32 / 2.
  CHECK(flops({"model.attention.window=32"}).activations == Approx(plain.activations * 3584 / 8192));
  CHECK(flops({"model.attention.window=32", "model.attention.window_pattern=2"}).activations ==
        Approx(plain.activations * (3584 + 8192) / 2 / 8192));
  const ModelConfig m = load_config(file).model;
  const auto product = static_cast<double>(2 * m.num_hidden_layers * m.num_attention_heads * m.head_dim);
  const auto added = [&](const std::string& kind) {
    return flops({"model.attention.kind=" + kind}).trained - plain.trained;
  };
  for (const char* free : {"off_by_one", "softpick", "sink"}) CHECK(added(free) == 0);
  CHECK(added("sink_key") == product);
  CHECK(added("kv_bias") == 2 * product);
}

TEST_CASE("gpt-oss-20b has the published number of parameters, and its biases cost no counted FLOPs",
          "[plan][flops]") {
  const std::string file = shipped("models/gpt_oss_20b.yaml");
  const Plan plan = make_plan(load_config(file));
  CHECK(plan.total == 20'914'757'184);
  CHECK(plan.active - int64_t{201088} * 2880 == 3'608'307'264);  // without the embedding: "3.6B"
  const Plan plain = make_plan(load_config(file, {"model.attention_bias=false", "model.moe.bias=false"}));
  const int64_t attention = 4096 + 2 * 512 + 2880, experts = 32 + 32 * (3 * 2880);
  CHECK(plan.total - plain.total == 24 * (attention + experts));
  CHECK(plan.flops_per_token == plain.flops_per_token);
}

TEST_CASE("kinds of attention add their parameters to the plan", "[plan]") {
  const std::string file = shipped("quickstart/baseline.yaml");
  const ModelConfig m = load_config(file).model;
  const auto total = [&](const std::string& kind) {
    return make_plan(load_config(file, {"model.attention.kind=" + kind})).total;
  };
  const auto plain = total("softmax");
  for (const char* none : {"off_by_one", "softpick"}) CHECK(total(none) == plain);
  const int64_t H = m.num_attention_heads, Hkv = m.num_key_value_heads, D = m.head_dim;
  CHECK(total("sink") == plain + m.num_hidden_layers * H);
  CHECK(total("sink_key") == plain + m.num_hidden_layers * H * D);
  CHECK(total("kv_bias") == plain + m.num_hidden_layers * 2 * Hkv * D);
}
