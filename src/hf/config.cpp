#include "hf/config.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

#include "config/fields.h"
#include "config/model_function.h"
#include "hf/holds.h"
#include "hf/model_types.h"

namespace sluice {
namespace {

template <class E>
std::string word(E e) {
  return std::string(EnumNames<E>::names[static_cast<size_t>(e)]);
}

/// Qwen3-MoE's keys, and Qwen3-Next's for the shared expert.
void add_experts(nlohmann::json& j, const MoeConfig& moe) {
  j["num_experts"] = moe.num_experts;
  j["num_experts_per_tok"] = moe.num_experts_per_tok;
  j["moe_intermediate_size"] = moe.moe_intermediate_size;
  j["norm_topk_prob"] = moe.norm_topk_prob;
  j["decoder_sparse_step"] = moe.decoder_sparse_step;
  j["mlp_only_layers"] = moe.mlp_only_layers;
  j["router_aux_loss_coef"] = moe.load_balance.coefficient;
  j["output_router_logits"] = false;
}

/// With YaRN the extended length: versions of transformers take the factor from it and from the original
/// length.
int64_t positions(const Config& config) {
  const RopeScalingConfig& scaling = config.model.rope.scaling;
  if (scaling.type == RopeScalingType::yarn)
    return std::llround(scaling.factor * static_cast<double>(scaling.original_max_position_embeddings));
  return config.model.max_position_embeddings.value_or(config.data.seq_len);
}

/// The keys that all of these models have. Names of transformers 4 (rope_theta, torch_dtype), which later
/// versions still read.
nlohmann::json common_keys(const Config& config, std::optional<int32_t> end_of_document) {
  const ModelConfig& m = config.model;
  const RopeScalingConfig& scaling = m.rope.scaling;
  const nlohmann::json begin = hf_token(config.data.begin_token);
  nlohmann::json j = {{"vocab_size", m.vocab_size},
                      {"hidden_size", m.hidden_size},
                      {"intermediate_size", m.intermediate_size},
                      {"num_hidden_layers", m.num_hidden_layers},
                      {"num_attention_heads", m.num_attention_heads},
                      {"num_key_value_heads", m.num_key_value_heads},
                      {"head_dim", m.head_dim},
                      {"hidden_act", word(m.hidden_act)},
                      {"rms_norm_eps", m.rms_norm_eps},
                      {"max_position_embeddings", positions(config)},
                      {"rope_theta", m.rope.theta},
                      {"rope_scaling", nullptr},
                      {"attention_bias", m.attention_bias},
                      {"qkv_bias", false},
                      {"attention_dropout", 0.0},
                      {"tie_word_embeddings", m.tie_word_embeddings},
                      {"initializer_range", m.initializer_range},
                      {"bos_token_id", begin},
                      {"eos_token_id", hf_token(end_of_document)},
                      // Of other programs' models the tokenizer's files decide, whatever bos_token_id says.
                      {"sluice_begin_token", begin},
                      {"torch_dtype", config.train.precision == Precision::bf16  ? "bfloat16"
                                      : config.train.precision == Precision::f64 ? "float64"
                                                                                 : "float32"},
                      {"use_cache", true}};
  if (scaling.type == RopeScalingType::yarn)
    j["rope_scaling"] = {{"rope_type", "yarn"},
                         {"factor", scaling.factor},
                         {"original_max_position_embeddings", scaling.original_max_position_embeddings},
                         {"beta_fast", scaling.beta_fast},
                         {"beta_slow", scaling.beta_slow}};
  if (scaling.type == RopeScalingType::yarn && !scaling.truncate) j["rope_scaling"]["truncate"] = false;
  if (scaling.type == RopeScalingType::yarn && scaling.attention_factor)
    j["rope_scaling"]["attention_factor"] = *scaling.attention_factor;
  return j;
}

nlohmann::json leaf(int64_t value) { return value; }
nlohmann::json leaf(double value) { return value; }
nlohmann::json leaf(bool value) { return value; }
nlohmann::json leaf(const std::optional<double>& value) { return value ? nlohmann::json(*value) : nullptr; }
template <class E>
  requires std::is_enum_v<E>
nlohmann::json leaf(E value) {
  return word(value);
}

/// The keys of model.attention.sparse that change the function, in sections as in the YAML.
nlohmann::json sparse_keys(SparseConfig sparse) {
  nlohmann::json j;
  for_each_leaf(sparse, [&](const std::string& key, auto& member, const char*) {
    if (!changes_function("model.attention.sparse." + key)) return;
    const size_t dot = key.find('.');
    (dot == std::string::npos ? j[key] : j[key.substr(0, dot)][key.substr(dot + 1)]) = leaf(member);
  });
  return j;
}

nlohmann::json attention_keys(const AttentionConfig& a) {
  nlohmann::json gates = nlohmann::json::array();
  for (const GateConfig& g : a.gates) {
    gates.push_back({{"position", word(g.position)},
                     {"granularity", word(g.granularity)},
                     {"heads", word(g.heads)},
                     {"combine", word(g.combine)},
                     {"activation", word(g.activation)},
                     {"input", word(g.input)}});
    if (g.input_channels > 0) gates.back()["input_channels"] = g.input_channels;
    if (g.bias) gates.back()["bias"] = *g.bias;
  }
  nlohmann::json j = {{"kind", word(a.kind)},
                      {"gates", gates},
                      {"output_norm", word(a.output_norm)},
                      {"output_activation", word(a.output_activation)}};
  if (a.window != 0 || a.window_pattern != 0) {
    j["window"] = a.window;
    j["window_pattern"] = a.window_pattern;
  }
  if (a.exclusive != ExclusiveAttention::none) j["exclusive"] = word(a.exclusive);
  if (a.kind == AttentionKind::sparse) j["sparse"] = sparse_keys(a.sparse);
  if (a.switch_heads.num_experts > 0)
    j["switch_heads"] = {{"num_experts", a.switch_heads.num_experts},
                         {"num_experts_per_tok", a.switch_heads.num_experts_per_tok},
                         {"projections", word(a.switch_heads.projections)},
                         {"expert_width", a.switch_heads.expert_width}};
  return j;
}

/// What no other program's configuration has.
void add_own_keys(nlohmann::json& j, const Config& config) {
  const ModelConfig& m = config.model;
  j["qk_norm"] = m.qk_norm;
  j["norm_placement"] = word(m.norm_placement);
  j["branch_clip"] = m.branch_clip ? nlohmann::json(*m.branch_clip) : nlohmann::json(nullptr);
  j["norm_weights"] = m.norm_weights;
  j["qk_norm_order"] = word(m.qk_norm_order);
  j["embedding_norm"] = m.embedding_norm;
  j["final_logit_softcapping"] =
      m.final_logit_softcapping ? nlohmann::json(*m.final_logit_softcapping) : nlohmann::json(nullptr);
  if (m.gated_norm.rank > 0) j["gated_norm"] = {{"rank", m.gated_norm.rank}};
  j["attention"] = attention_keys(m.attention);
  if (config.lora.rank > 0)
    j["lora"] = {{"rank", config.lora.rank}, {"alpha", config.lora.alpha}, {"targets", config.lora.targets}};
  if (m.moe.num_experts == 0) return;
  j["moe_bias"] = m.moe.bias;
  j["swiglu_limit"] = leaf(m.moe.swiglu_limit);
  j["shared_expert_intermediate_size"] = m.moe.shared_expert_intermediate_size;
  j["shared_expert_gate"] = m.moe.shared_expert_gate;
  j["router_z_loss_coefficient"] = m.moe.router_z_loss_coefficient;
  j["load_balance_scope"] = word(m.moe.load_balance.scope);
}

/// What config.json calls a format.
struct Names {
  const char *model_type, *architecture;
};

Names names_of(HfFormat format) {
  switch (format) {
    case HfFormat::llama:
      return {"llama", "LlamaForCausalLM"};
    case HfFormat::qwen3:
    case HfFormat::gated_attention:
      return {"qwen3", "Qwen3ForCausalLM"};
    case HfFormat::qwen3_moe:
      return {"qwen3_moe", "Qwen3MoeForCausalLM"};
    case HfFormat::qwen3_next:
      return {"qwen3_next", "Qwen3NextForCausalLM"};
    case HfFormat::gpt_oss:
      return {"gpt_oss", "GptOssForCausalLM"};
    case HfFormat::sluice:
      break;
  }
  return {"sluice", "SluiceForCausalLM"};
}

/// Every layer has full attention; the rotary embedding covers the whole head. Qwen3-Next's code also reads
/// the sizes of its linear attention, of which there is none here.
void add_qwen3_next_keys(nlohmann::json& j, const ModelConfig& m) {
  add_experts(j, m.moe);
  j["shared_expert_intermediate_size"] = std::max<int64_t>(m.moe.shared_expert_intermediate_size, 1);
  if (m.moe.num_experts > 0) j["shared_expert_intermediate_size"] = m.moe.shared_expert_intermediate_size;
  j["partial_rotary_factor"] = 1.0;
  j["layer_types"] = std::vector<std::string>(static_cast<size_t>(m.num_hidden_layers), "full_attention");
}

/// Its experts' width is intermediate_size; without rope_scaling it would have YaRN.
void add_gpt_oss_keys(nlohmann::json& j, const ModelConfig& m) {
  j["intermediate_size"] = m.moe.moe_intermediate_size;
  j["num_local_experts"] = m.moe.num_experts;
  j["num_experts_per_tok"] = m.moe.num_experts_per_tok;
  j["swiglu_limit"] = leaf(m.moe.swiglu_limit);
  j["swiglu_alpha"] = kGptOssSlope;
  j["router_aux_loss_coef"] = m.moe.load_balance.coefficient;
  j["output_router_logits"] = false;
  if (m.rope.scaling.type == RopeScalingType::none) j["rope_scaling"] = {{"rope_type", "default"}};
  // transformers makes its mask even where no layer has a window.
  j["sliding_window"] = m.attention.window > 0 ? m.attention.window : kGptOssWindow;
  j["layer_types"] = nlohmann::json::array();
  for (int64_t i = 0; i < m.num_hidden_layers; ++i)
    j["layer_types"].push_back(m.attention.window_in_layer(i) > 0 ? "sliding_attention" : "full_attention");
}

void add_gated_attention_keys(nlohmann::json& j, const ModelConfig& m) {
  const bool gated = m.attention.gates.size() == 1;
  const bool headwise = gated && m.attention.gates[0].granularity == GateGranularity::headwise;
  j["use_qk_norm"] = m.qk_norm;
  j["attention_bias"] = false;  // its code reads qkv_bias alone
  j["elementwise_attn_output_gate"] = gated && !headwise;
  j["headwise_attn_output_gate"] = headwise;
}

}  // namespace

nlohmann::json hf_token(std::optional<int64_t> token) {
  return token ? nlohmann::json(*token) : nlohmann::json(nullptr);
}

nlohmann::json hf_config(const Config& config, std::optional<int32_t> end_of_document, HfFormat format) {
  nlohmann::json j = common_keys(config, end_of_document);
  const Names names = names_of(format);
  j["architectures"] = nlohmann::json::array({names.architecture});
  j["model_type"] = names.model_type;
  switch (format) {
    case HfFormat::llama:
    case HfFormat::qwen3:
      break;
    case HfFormat::qwen3_moe:
      add_experts(j, config.model.moe);
      break;
    case HfFormat::qwen3_next:
      add_qwen3_next_keys(j, config.model);
      break;
    case HfFormat::gpt_oss:
      add_gpt_oss_keys(j, config.model);
      break;
    case HfFormat::gated_attention:
      add_gated_attention_keys(j, config.model);
      break;
    case HfFormat::sluice:
      if (config.model.moe.num_experts > 0) add_experts(j, config.model.moe);
      add_own_keys(j, config);
      break;
  }
  return j;
}

nlohmann::json hf_config(const Config& config, std::optional<int32_t> end_of_document) {
  for (const HfFormat format : {HfFormat::qwen3, HfFormat::llama, HfFormat::qwen3_moe})
    if (not_held(config, format).empty()) return hf_config(config, end_of_document, format);
  return hf_config(config, end_of_document, HfFormat::sluice);
}

}  // namespace sluice
