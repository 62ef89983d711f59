// config.json of other programs and of Sluice, intact and damaged.
#include <catch2/catch.hpp>
#include <random>

#include "config/fields.h"
#include "config/model_function.h"
#include "core/error.h"
#include "core/io.h"
#include "data/temporary.h"
#include "hf/config.h"

using namespace sluice;
using namespace sluice::test;
using Catch::Matchers::Contains;

namespace {

const std::string kGolden = SLUICE_SOURCE_DIR "/tests/golden/";

struct Folder {
  TemporaryFolder folder;
  std::string file = folder / "config.json";
  HfModel read(const std::string& text) const {
    write_bytes(file, text);
    return read_hf_config(file);
  }
  HfModel read(const nlohmann::json& j) const { return read(j.dump()); }
  /// The message of a refusal, which must be Error(data).
  std::string refusal(const std::string& text) const {
    try {
      read(text);
    } catch (const Error& error) {
      CHECK(error.code() == ExitCode::data);
      CHECK_THAT(error.what(), Contains("config.json"));
      return error.what();
    }
    return "";
  }
};

/// A Llama whose file states everything except positions.
nlohmann::json llama() {
  return {{"model_type", "llama"},         {"vocab_size", 300},      {"hidden_size", 64},
          {"intermediate_size", 96},       {"num_hidden_layers", 2}, {"num_attention_heads", 4},
          {"num_key_value_heads", 2},      {"rms_norm_eps", 1e-5},   {"tie_word_embeddings", false},
          {"max_position_embeddings", 128}};
}

nlohmann::json with(nlohmann::json j, const nlohmann::json& more) {
  j.update(more);
  return j;
}

/// What HfModel::unsupported says, in one text.
std::string unsupported(const HfModel& m) {
  std::string text;
  for (const auto& u : m.unsupported) text += u.what + " [" + u.accepted_by + "]\n";
  return text;
}

}  // namespace

TEST_CASE("keys that transformers omits from config.json have the model type's defaults", "[hf_config]") {
  const Folder f;
  const ModelConfig llama = f.read(std::string(R"({"model_type": "llama"})")).model;
  CHECK(llama.vocab_size == 32000);
  CHECK(llama.hidden_size == 4096);
  CHECK(llama.intermediate_size == 11008);
  CHECK(llama.num_key_value_heads == 32);
  CHECK(llama.head_dim == 128);
  CHECK_FALSE(llama.qk_norm);
  CHECK_FALSE(llama.tie_word_embeddings);
  CHECK(llama.rms_norm_eps == 1e-6);
  CHECK(llama.rope.theta == 10000);
  const HfModel qwen = f.read(std::string(R"({"model_type": "qwen3", "hidden_size": 1024})"));
  CHECK(qwen.model.head_dim == 128);
  CHECK(qwen.model.num_key_value_heads == 32);
  CHECK(qwen.model.qk_norm);
  CHECK(qwen.spelled.at("model.hidden_size").given);
  CHECK_FALSE(qwen.spelled.at("model.head_dim").given);
  const ModelConfig moe = f.read(std::string(R"({"model_type": "qwen3_moe"})")).model;
  CHECK(moe.moe.num_experts == 128);
  CHECK(moe.moe.num_experts_per_tok == 8);
  CHECK_FALSE(moe.moe.norm_topk_prob);
  CHECK(moe.head_dim == 64);
  CHECK(
      f.read(std::string(R"({"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": null})"))
          .model.num_key_value_heads == 8);
  CHECK(f.read(std::string(R"({"model_type": "mistral", "sliding_window": null})")).unsupported.empty());
  CHECK(f.read(std::string(R"({"model_type": "mistral", "sliding_window": null})")).model.attention.window ==
        0);
  CHECK(f.read(std::string(R"({"model_type": "mistral"})")).model.attention.window == 4096);
  for (const char* name : {"qwen3_tiny", "qwen3_moe_tiny"})
    CHECK(read_hf_config(kGolden + name + "/config.json").unsupported.empty());
  const ModelConfig tiny = read_hf_config(kGolden + "qwen3_moe_tiny/config.json").model;
  CHECK(tiny.moe.num_experts == 6);
  CHECK(tiny.moe.mlp_only_layers == std::vector<int64_t>{1});
  CHECK(tiny.moe.norm_topk_prob);
}

TEST_CASE("both spellings of the rotary keys are equivalent", "[hf_config]") {
  const Folder f;
  const nlohmann::json yarn = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32}, {"beta_fast", 30}};
  nlohmann::json with_theta = yarn, old = yarn;
  with_theta["rope_theta"] = 1e6;
  old.erase("rope_type");
  old["type"] = "yarn";
  for (const nlohmann::json& more :
       {nlohmann::json{{"rope_theta", 1e6}, {"rope_scaling", old}},
        nlohmann::json{{"rope_parameters", with_theta}},
        nlohmann::json{{"rope_theta", 1000000}, {"rope_scaling", yarn}, {"rope_parameters", with_theta}}}) {
    const HfModel m = f.read(with(llama(), more));
    CHECK(m.model.rope.theta == 1e6);
    CHECK(m.model.rope.scaling.type == RopeScalingType::yarn);
    CHECK(m.model.rope.scaling.factor == 4);
    CHECK(m.model.rope.scaling.original_max_position_embeddings == 32);
    CHECK(m.model.rope.scaling.beta_fast == 30);
    CHECK(m.model.rope.scaling.beta_slow == 1);
    CHECK(m.unsupported.empty());
  }
  CHECK(f.read(with(llama(), {{"rope_parameters", with_theta}})).spelled.at("model.rope.theta").key ==
        "rope_parameters.rope_theta");
  // Without a factor it is the ratio of the lengths.
  CHECK(
      f.read(with(llama(), {{"rope_scaling", {{"type", "yarn"}, {"original_max_position_embeddings", 64}}}}))
          .model.rope.scaling.factor == 2);
  CHECK_THAT(f.refusal(with(llama(), {{"rope_theta", 1e4}, {"rope_parameters", with_theta}}).dump()),
             Contains("rope_theta is 10000") && Contains("1000000"));
  CHECK_THAT(
      f.refusal(
          with(llama(), {{"rope_scaling", yarn}, {"rope_parameters", {{"rope_type", "default"}}}}).dump()),
      Contains("both present and differ"));
  // 0.1 ln 4 + 1 corresponds to factor 4.
  const auto scale = [&](const nlohmann::json& more) {
    const HfModel m = f.read(with(llama(), {{"rope_scaling", with(yarn, more)}}));
    CHECK(m.unsupported.empty());
    return m.model.rope.scaling.attention_factor;
  };
  CHECK(scale({{"attention_factor", 0.1 * std::log(4.0) + 1}}) == std::nullopt);
  CHECK(scale({{"attention_factor", 1.0}}) == 1.0);
  CHECK(scale({{"mscale", 1.0}, {"mscale_all_dim", 1.0}}) == 1.0);  // as of DeepSeek-V3
  CHECK(*scale({{"mscale", 1.0}, {"mscale_all_dim", 0.7}}) ==
        Approx((0.1 * std::log(4.0) + 1) / (0.07 * std::log(4.0) + 1)));
  CHECK(f.refusal(with(llama(), {{"rope_scaling", with(yarn, {{"attention_factor", 0.0}})}}).dump()) != "");
  for (const char* type : {"llama3", "linear", "dynamic", "longrope"})
    CHECK_THAT(unsupported(f.read(with(llama(), {{"rope_scaling", {{"rope_type", type}, {"factor", 8.0}}}}))),
               Contains(fmt::format("rope_scaling.rope_type = \"{}\"", type)));
}

TEST_CASE("sliding windows of other programs are those of Sluice where it has such", "[hf_config]") {
  const Folder f;
  const auto windows = [&](const nlohmann::json& more) {
    const HfModel model = f.read(with(llama(), more));
    INFO(more.dump() << unsupported(model));
    CHECK(model.unsupported.empty());
    return std::pair{model.model.attention.window, model.model.attention.window_pattern};
  };
  using Windows = std::pair<int64_t, int64_t>;
  const nlohmann::json qwen = {{"model_type", "qwen3"}, {"use_sliding_window", true}, {"sliding_window", 64}};
  CHECK(windows({{"model_type", "mistral"}, {"sliding_window", 32}}) == Windows{32, 0});
  nlohmann::json moe = qwen;
  moe["model_type"] = "qwen3_moe";
  CHECK(windows(moe) == Windows{64, 0});
  // Without sliding_window transformers takes 4096.
  for (const char* type : {"qwen3", "qwen3_moe"})
    CHECK(windows({{"model_type", type}, {"use_sliding_window", true}, {"max_window_layers", 0}}) ==
          Windows{4096, 0});
  CHECK(windows(with(qwen, {{"max_window_layers", 0}})) == Windows{64, 0});
  const char *s = "sliding_attention", *full = "full_attention";
  CHECK(windows(with(qwen, {{"layer_types", {s, s}}})) == Windows{64, 0});
  CHECK(windows(with(qwen, {{"layer_types", {full, full}}})) == Windows{0, 0});
  CHECK(windows(with(qwen, {{"layer_types", {s, full}}})) == Windows{64, 2});
  CHECK(windows(with(qwen, {{"num_hidden_layers", 5}, {"layer_types", {s, s, full, s, s}}})) ==
        Windows{64, 3});
  const auto refused = [&](nlohmann::json more) {
    return unsupported(f.read(with(llama(), with(qwen, std::move(more)))));
  };
  CHECK_THAT(refused({{"layer_types", {full, s}}}), Contains("all but every n-th) [model.attention]"));
  CHECK_THAT(refused({{"num_hidden_layers", 4}, {"layer_types", {s, full, full, s}}}),
             Contains("all but every n-th"));
  CHECK_THAT(refused({{"layer_types", {s}}}), Contains("as long as num_hidden_layers"));
  CHECK_THAT(refused({{"use_sliding_window", false}, {"layer_types", {s, full}}}),
             Contains("without sliding_window"));
  CHECK_THAT(refused({{"layer_types", {s, "linear_attention"}}}), Contains("of this kind are not imported"));
  CHECK_THAT(unsupported(f.read(with(llama(), {{"layer_types", {full, s}}}))), Contains("layer_types = "));
}

TEST_CASE("a gpt-oss has its own defaults, and what it does not say is refused by name", "[hf_config]") {
  const Folder f;
  const nlohmann::json least = {{"model_type", "gpt_oss"}};
  const HfModel read = f.read(least);
  const ModelConfig& m = read.model;
  CHECK(read.unsupported.empty());
  CHECK(read.format == HfFormat::gpt_oss);
  CHECK(m.vocab_size == 201088);
  CHECK(m.num_hidden_layers == 36);
  CHECK(m.rms_norm_eps == 1e-5);
  CHECK(m.attention_bias);
  CHECK_FALSE(m.qk_norm);
  CHECK(m.attention.kind == AttentionKind::sink);
  CHECK(m.attention.window == 128);
  CHECK(m.attention.window_pattern == 2);  // sliding windows in layers 0, 2, ...
  CHECK(m.rope.theta == 150000);
  CHECK(m.rope.scaling.type == RopeScalingType::yarn);
  CHECK(m.rope.scaling.factor == 32);
  CHECK_FALSE(m.rope.scaling.truncate);
  CHECK(m.moe.num_experts == 128);
  CHECK(m.moe.num_experts_per_tok == 4);
  CHECK(m.moe.moe_intermediate_size == 2880);
  CHECK(m.moe.norm_topk_prob);
  CHECK(m.moe.bias);
  CHECK(m.moe.swiglu_limit == 7.0);
  // The published file's spelling of the rotary keys.
  const nlohmann::json scaling = {{"rope_type", "yarn"}, {"factor", 32.0},
                                  {"beta_fast", 32.0},   {"beta_slow", 1.0},
                                  {"truncate", false},   {"original_max_position_embeddings", 4096}};
  const ModelConfig published =
      f.read(with(least, {{"rope_scaling", scaling}, {"rope_theta", 150000}, {"swiglu_limit", 7.0}})).model;
  CHECK(function_differences(published, m).empty());
  const nlohmann::json alike = {{"num_hidden_layers", 2},
                                {"layer_types", {"sliding_attention", "full_attention"}}};
  CHECK(f.read(with(least, alike)).model.attention.window_pattern == 2);
  const nlohmann::json full = {{"num_hidden_layers", 1}, {"layer_types", {"full_attention"}}};
  CHECK(f.read(with(least, full)).model.attention.window == 0);
  CHECK(f.read(with(least, {{"rope_scaling", {{"rope_type", "default"}}}})).model.rope.scaling.type ==
        RopeScalingType::none);
  CHECK_FALSE(f.read(with(least, {{"attention_bias", false}})).model.attention_bias);
  CHECK_THAT(unsupported(f.read(with(least, {{"swiglu_alpha", 1.5}}))), Contains("swiglu_alpha = 1.5"));
  CHECK(unsupported(f.read(with(least, {{"quantization_config", {{"quant_method", "mxfp4"}}}}))).empty());
  for (const nlohmann::json& other :
       {nlohmann::json{{"quant_method", "awq"}}, nlohmann::json{{"bits", 4}}, nlohmann::json(4)})
    CHECK_THAT(unsupported(f.read(with(least, {{"quantization_config", other}}))),
               Contains("quantization_config = "));
  CHECK_THAT(unsupported(f.read(with(llama(), {{"quantization_config", {{"quant_method", "mxfp4"}}}}))),
             Contains("quantization_config = "));
  CHECK_THAT(f.refusal(with(least, {{"swiglu_limit", -1.0}}).dump()),
             Contains("swiglu_limit must be greater"));
  CHECK_THAT(unsupported(f.read(with(least, {{"num_local_experts", 0}}))), Contains("num_local_experts = 0"));
}

TEST_CASE("biases of attention are read where the family's code has them", "[hf_config]") {
  const Folder f;
  const nlohmann::json biased = with(llama(), {{"attention_bias", true}});
  for (const char* type : {"llama", "qwen3", "qwen3_moe", "sluice"}) {
    const HfModel read = f.read(with(biased, {{"model_type", type}}));
    CHECK(read.model.attention_bias);
    CHECK(read.unsupported.empty());
  }
  CHECK_THAT(
      unsupported(f.read(with(biased, {{"model_type", "qwen3"}, {"elementwise_attn_output_gate", true}}))),
      Contains("attention_bias = true"));
}

TEST_CASE("values without counterpart are reported by name", "[hf_config]") {
  const Folder f;
  const std::vector<std::pair<nlohmann::json, std::string>> cases = {
      {{{"model_type", "mistral"}, {"attention_bias", true}}, "attention_bias = true []"},
      {{{"swiglu_limit", 7.0}}, "swiglu_limit = 7.0 [model]"},
      {{{"mlp_bias", true}}, "mlp_bias = true []"},
      {{{"partial_rotary_factor", 0.5}}, "partial_rotary_factor = 0.5 [model.rope]"},
      {{{"rope_parameters", {{"partial_rotary_factor", 0.25}}}},
       "rope_parameters.partial_rotary_factor = 0.25 [model.rope]"},
      {{{"rope_parameters", {{"full_attention", {{"rope_theta", 1e6}}}}}}, "rope_parameters.full_attention"},
      {{{"attn_logit_softcapping", 50.0}}, "attn_logit_softcapping = 50.0 [model.attention]"},
      {{{"final_logit_softcapping", 30.0}}, "final_logit_softcapping = 30.0 [model.final_logit_softcapping]"},
      {{{"embedding_multiplier", 12.0}}, "embedding_multiplier = 12.0 [model]"},
      {{{"hidden_act", "gelu"}}, "hidden_act = \"gelu\" [model.hidden_act]"},
      {{{"hidden_act", "relu2"}}, "hidden_act = \"relu2\" [model.hidden_act]"},
      {{{"quantization_config", {{"bits", 4}}}}, "quantization_config = {\"bits\":4} []"},
      {{{"sliding_window", 128}}, "sliding_window = 128 [model.attention.window]"},
      {{{"layer_types", {"full_attention", "sliding_attention"}}}, "layer_types = "},
      {{{"auto_map", {{"AutoModel", "x.y"}}}}, "auto_map = "},
      {{{"architectures", {"LlamaForSequenceClassification"}}},
       "model_type llama stands for LlamaForCausalLM"},
  };
  for (const auto& [more, text] : cases) {
    INFO(more.dump());
    CHECK_THAT(unsupported(f.read(with(llama(), more))), Contains(text));
  }
  // The same keys with values that change nothing, as transformers writes them.
  CHECK(unsupported(f.read(with(llama(), {{"attention_bias", false},
                                          {"mlp_bias", false},
                                          {"partial_rotary_factor", 1.0},
                                          {"pretraining_tp", 1},
                                          {"rope_scaling", nullptr},
                                          {"sliding_window", nullptr},
                                          {"embedding_multiplier", 1.0},
                                          {"hidden_act", "silu"},
                                          {"architectures", {"LlamaForCausalLM"}},
                                          {"layer_types", {"full_attention", "full_attention"}}})))
            .empty());
  nlohmann::json qwen =
      with(llama(), {{"model_type", "qwen3"}, {"sliding_window", 64}, {"use_sliding_window", false}});
  CHECK(f.read(qwen).unsupported.empty());
  CHECK(f.read(qwen).model.attention.window == 0);
  qwen.update({{"use_sliding_window", true}, {"max_window_layers", 1}});
  CHECK_THAT(unsupported(f.read(qwen)), Contains("max_window_layers = 1"));
  qwen["max_window_layers"] = 2;
  CHECK(f.read(qwen).unsupported.empty());
  CHECK(f.read(qwen).model.attention.window == 0);

  for (const char* type :
       {"gemma", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "qwen2", "mixtral", "t5", "LLAMA"})
    CHECK_THAT(f.refusal(with(llama(), {{"model_type", type}}).dump()),
               Contains(fmt::format("weights of model_type {} are not supported", type)) &&
                   Contains("supported are llama, mistral, qwen3, qwen3_moe, qwen3_next, gpt_oss, sluice"));
  CHECK_THAT(f.refusal("{}"), Contains("no model_type"));
}

namespace {

/// Another value that is allowed.
void alter(bool& value) { value = !value; }
void alter(int64_t& value) { value += value == 0 ? 2 : 1; }
void alter(double& value) { value = 2 * value + 0.25; }
void alter(std::string& value) { value += "x"; }
void alter(std::vector<int64_t>& value) { value.push_back(1); }
template <class T>
void alter(std::optional<T>& value) {
  value = value ? std::nullopt : std::optional<T>(7);
}
template <class E>
requires std::is_enum_v<E>
void alter(E& value) {
  value = static_cast<E>((static_cast<size_t>(value) + 1) % EnumNames<E>::names.size());
}

/// A model in which every key has an effect.
Config full() {
  Config config;
  ModelConfig& m = config.model;
  m.vocab_size = 300;
  m.rope.scaling = {RopeScalingType::yarn, 2.0, 64, 30.0, 2.0, false, 1.25};
  m.attention.gates = {GateConfig{},
                       GateConfig{GatePosition::value, GateGranularity::headwise, GateSharing::shared,
                                  GateCombine::add, GateActivation::silu, GateInput::none}};
  m.attention.switch_heads = {4, 2, SwitchProjections::value, 32};
  m.moe.num_experts = 8;
  m.moe.shared_expert_intermediate_size = 24;
  m.moe.mlp_only_layers = {0};
  m.branch_clip = 3;
  m.final_logit_softcapping = 15;
  return config;
}

template <class Visit>
void for_each_model_leaf(ModelConfig& m, Visit visit) {
  LeafWalker walker(visit, "model");
  m.fields(walker);
}

}  // namespace

TEST_CASE(
    "each model key that changes the function round-trips through Sluice's config.json, and differences are "
    "found",
    "[hf_config]") {
  const Folder f;
  const auto keys_of = [](const std::vector<FunctionDifference>& all) {
    std::vector<std::string> keys;
    for (const FunctionDifference& d : all) keys.push_back(d.key);
    return keys;
  };
  std::vector<std::string> keys;
  ModelConfig counted = full().model;
  for_each_model_leaf(counted, [&](const std::string& key, auto&, const char*) { keys.push_back(key); });
  CHECK(keys.size() > 55);
  std::vector<std::string> same;
  for (size_t i = 0; i < keys.size(); ++i) {
    INFO(keys[i]);
    Config base = full();
    if (keys[i].starts_with("model.attention.sparse.")) base.model.attention.kind = AttentionKind::sparse;
    Config config = base;
    size_t at = 0;
    for_each_model_leaf(config.model, [&](const std::string&, auto& member, const char*) {
      if (at++ == i) alter(member);
    });
    const std::vector<FunctionDifference> differences = function_differences(base.model, config.model);
    if (!changes_function(keys[i])) {
      same.push_back(keys[i]);
      CHECK(differences.empty());
      continue;
    }
    CHECK(keys_of(differences) == std::vector<std::string>{keys[i]});
    const HfModel read = f.read(hf_config(config, 1));
    CHECK(read.model_type == "sluice");
    CHECK(read.unsupported.empty());
    CHECK(keys_of(function_differences(read.model, config.model)).empty());
    CHECK(read.spelled.count(keys[i]) == 1);
  }
  CHECK(same == std::vector<std::string>{"model.initializer",
                                         "model.initializer_range",
                                         "model.scaled_residual_init",
                                         "model.logit_z_loss_coefficient",
                                         "model.gated_norm.init",
                                         "model.max_position_embeddings",
                                         "model.attention.gates[0].init",
                                         "model.attention.gates[1].init",
                                         "model.attention.head_balance.coefficient",
                                         "model.attention.head_balance.scope",
                                         "model.attention.head_balance.shared_heads",
                                         "model.attention.head_balance.shared_from",
                                         "model.attention.head_balance.calibration_samples",
                                         "model.attention.head_balance.ddof",
                                         "model.attention.head_balance.skip_first",
                                         "model.attention.kernel",
                                         "model.attention.sparse.indexer.detach_input",
                                         "model.attention.sparse.loss.coefficient",
                                         "model.attention.sparse.phase_steps",
                                         "model.moe.load_balance.coefficient",
                                         "model.moe.load_balance.scope",
                                         "model.moe.router_z_loss_coefficient",
                                         "model.match_parameters_of",
                                         "model.match_multiple"});
}

TEST_CASE("keys without effect are not compared, and gate lists of different lengths are reported as a whole",
          "[hf_config]") {
  ModelConfig a, b;
  b.rope.scaling.beta_fast = 20;
  b.moe.num_experts_per_tok = 4;
  b.moe.norm_topk_prob = false;
  b.attention.switch_heads.expert_width = 8;
  b.rms_norm_eps = static_cast<double>(1e-6f);
  CHECK(function_differences(a, b).empty());
  b.moe.num_experts = a.moe.num_experts = 4;
  CHECK(function_differences(a, b).size() == 2);
  a = b;
  a.intermediate_size = 5;  // all layers have experts
  CHECK(function_differences(a, b).empty());
  a.num_hidden_layers = b.num_hidden_layers = 4;
  a.moe.decoder_sparse_step = 2;
  b.moe.mlp_only_layers = {2, 0};
  b.intermediate_size = 5;
  CHECK(function_differences(a, b).empty());  // the same layers have experts
  b.moe.mlp_only_layers = {0};
  CHECK_FALSE(function_differences(a, b).empty());
  a = b;
  a.attention.gates = {GateConfig{}};
  const auto gates = function_differences(a, b);
  REQUIRE(gates.size() == 1);
  CHECK(gates[0].key == "model.attention.gates");
  CHECK_THAT(gates[0].source, Contains("position: sdpa_output") && Contains("activation: sigmoid"));
  CHECK(gates[0].here == "[]");
}

TEST_CASE("any damage to config.json is Error(data)", "[hf_config]") {
  const Folder f;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "not JSON"},
      {"[]", "not an object"},
      {"{\"model_type\": \"llama\", \"model_type\": \"qwen3\"}", "duplicate key 'model_type'"},
      {R"({"model_type": 5})", "model_type must be text, got 5"},
      {R"({"model_type": "llama", "hidden_size": "64"})", "hidden_size must be a whole number"},
      {R"({"model_type": "llama", "hidden_size": -4})",
       "hidden_size must be a whole number from 1 to 2147483647, got -4"},
      {R"({"model_type": "llama", "hidden_size": 18446744073709551615})", "hidden_size must be"},
      {R"({"model_type": "llama", "num_attention_heads": 0})", "num_attention_heads must be"},
      {R"({"model_type": "llama", "hidden_size": 64.0})", "hidden_size must be"},
      {R"({"model_type": "llama", "rms_norm_eps": 1e999})", "not JSON"},
      {R"({"model_type": "llama", "rms_norm_eps": NaN})", "not JSON"},
      {R"({"model_type": "llama", "rope_theta": -1})", "rope_theta must be greater than 0"},
      {R"({"model_type": "llama", "tie_word_embeddings": 1})", "tie_word_embeddings must be true or false"},
      {R"({"model_type": "llama", "rope_scaling": "yarn"})", "rope_scaling must be an object"},
      {R"({"model_type": "llama", "rope_scaling": {"rope_type": ["yarn"]}})",
       "rope_scaling.rope_type must be text"},
      {R"({"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 8}})",
       "rope_scaling.original_max_position_embeddings must be given"},
      {R"({"model_type": "llama", "max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 0}})",
       "rope_scaling.factor must be"},
      {R"({"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "type": "linear"}})",
       "rope_scaling.type must be yarn"},
      {R"({"model_type": "llama", "layer_types": 7})", "layer_types must be a list"},
      {R"({"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8})",
       "num_local_experts must be 4"},
      {R"({"model_type": "qwen3_moe", "mlp_only_layers": [-1]})", "mlp_only_layers must be"},
      {R"({"model_type": "sluice", "attention": {"gates": [7]}})",
       "attention.gates must be a list of objects"},
      {R"({"model_type": "sluice", "attention": {"gates": [{"postion": "value"}]}})",
       "unknown key attention.gates[0].postion"},
      {R"({"model_type": "sluice", "attention": {"gates": [{"position": "here"}]}})",
       "attention.gates[0].position must be one of query |"},
      {std::string(100, '['), "nested deeper"},
  };
  for (const auto& [text, message] : cases) {
    INFO(text);
    CHECK_THAT(f.refusal(text), Contains(message));
  }
  CHECK_THROWS_AS(read_hf_config(f.folder / "absent.json"), Error);

  // Mutations of good files are either read or refused as Error(data).
  std::mt19937 random(3);
  const std::vector<std::string> seeds = {io::read_file(kGolden + "qwen3_moe_tiny/config.json"),
                                          hf_config(full(), 1).dump(2)};
  const std::vector<std::string> pieces = {"null", "-1",   "1e308", "{}",
                                           "[]",   "\"\"", "true",  "9223372036854775808",
                                           "0.5",  ",",    ":",     "[{\"a\":1}]"};
  int64_t refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string text = seeds[static_cast<size_t>(i % 2)];
    for (int n = 0; n <= static_cast<int>(random() % 3); ++n) {
      const size_t at = random() % text.size();
      if (random() % 2 == 0) {
        text[at] = static_cast<char>(random() % 256);
        continue;
      }
      // A whole value is replaced.
      const size_t begin = text.find(": ", at);
      if (begin == std::string::npos) continue;
      text.replace(begin + 2, text.find_first_of(",\n", begin) - begin - 2, pieces[random() % pieces.size()]);
    }
    try {
      f.read(text);
    } catch (const Error& error) {
      ++refused;
      INFO(error.what() << "\n" << text);
      REQUIRE(error.code() == ExitCode::data);
    }
  }
  CHECK(refused > 500);
  CHECK(refused < 3000);
}
