#include "hf/config.h"

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

}  // namespace

nlohmann::json hf_config(const Config& config, int32_t end_of_document) {
  const ModelConfig& m = config.model;
  const AttentionConfig& a = m.attention;
  const bool experts = m.moe.num_experts > 0;
  // Features that neither Llama nor Qwen3 has.
  const bool nanochat = m.hidden_act != HiddenAct::silu || !m.norm_weights || m.embedding_norm ||
                        m.final_logit_softcapping ||
                        (m.qk_norm && m.qk_norm_order != QkNormOrder::before_rope);
  // Llama has no experts, and Qwen3-MoE no shared expert.
  const bool adapters = config.lora.rank > 0;  // other programs would ignore adapters beside the weights
  const bool plain = !adapters && a.kind == AttentionKind::softmax && a.gates.empty() &&
                     a.switch_heads.num_experts == 0 && a.output_norm == OutputNorm::none &&
                     a.output_activation == OutputActivation::none &&
                     m.norm_placement == NormPlacement::pre && !m.branch_clip && !nanochat &&
                     (!experts || (m.qk_norm && m.moe.shared_expert_intermediate_size == 0));
  const int64_t positions = m.max_position_embeddings.value_or(config.data.seq_len);
  // Names of transformers 4 (rope_theta, torch_dtype), which later versions still read.
  nlohmann::json j = {{"architectures",
                       {!plain      ? "SluiceForCausalLM"
                        : experts   ? "Qwen3MoeForCausalLM"
                        : m.qk_norm ? "Qwen3ForCausalLM"
                                    : "LlamaForCausalLM"}},
                      {"model_type", !plain      ? "sluice"
                                     : experts   ? "qwen3_moe"
                                     : m.qk_norm ? "qwen3"
                                                 : "llama"},
                      {"vocab_size", m.vocab_size},
                      {"hidden_size", m.hidden_size},
                      {"intermediate_size", m.intermediate_size},
                      {"num_hidden_layers", m.num_hidden_layers},
                      {"num_attention_heads", m.num_attention_heads},
                      {"num_key_value_heads", m.num_key_value_heads},
                      {"head_dim", m.head_dim},
                      {"hidden_act", word(m.hidden_act)},
                      {"rms_norm_eps", m.rms_norm_eps},
                      {"max_position_embeddings", positions},
                      {"rope_theta", m.rope.theta},
                      {"rope_scaling", nullptr},
                      {"attention_bias", false},
                      {"attention_dropout", 0.0},
                      {"tie_word_embeddings", m.tie_word_embeddings},
                      {"initializer_range", m.initializer_range},
                      {"bos_token_id", nullptr},
                      {"eos_token_id", end_of_document},
                      {"torch_dtype", config.train.precision == Precision::bf16  ? "bfloat16"
                                      : config.train.precision == Precision::f64 ? "float64"
                                                                                 : "float32"},
                      {"use_cache", true}};
  if (m.rope.scaling.type == RopeScalingType::yarn)
    j["rope_scaling"] = {
        {"rope_type", "yarn"},
        {"factor", m.rope.scaling.factor},
        {"original_max_position_embeddings", m.rope.scaling.original_max_position_embeddings},
        {"beta_fast", m.rope.scaling.beta_fast},
        {"beta_slow", m.rope.scaling.beta_slow}};
  if (experts) add_experts(j, m.moe);
  if (plain) return j;
  nlohmann::json gates = nlohmann::json::array();
  for (const GateConfig& g : a.gates)
    gates.push_back({{"position", word(g.position)},
                     {"granularity", word(g.granularity)},
                     {"heads", word(g.heads)},
                     {"combine", word(g.combine)},
                     {"activation", word(g.activation)},
                     {"input", word(g.input)}});
  j["qk_norm"] = m.qk_norm;
  j["norm_placement"] = word(m.norm_placement);
  j["branch_clip"] = m.branch_clip ? nlohmann::json(*m.branch_clip) : nlohmann::json(nullptr);
  j["norm_weights"] = m.norm_weights;
  j["qk_norm_order"] = word(m.qk_norm_order);
  j["embedding_norm"] = m.embedding_norm;
  j["final_logit_softcapping"] =
      m.final_logit_softcapping ? nlohmann::json(*m.final_logit_softcapping) : nlohmann::json(nullptr);
  j["attention"] = {{"kind", word(a.kind)},
                    {"gates", gates},
                    {"output_norm", word(a.output_norm)},
                    {"output_activation", word(a.output_activation)}};
  if (adapters)
    j["lora"] = {{"rank", config.lora.rank}, {"alpha", config.lora.alpha}, {"targets", config.lora.targets}};
  if (a.switch_heads.num_experts > 0)
    j["attention"]["switch_heads"] = {{"num_experts", a.switch_heads.num_experts},
                                      {"num_experts_per_tok", a.switch_heads.num_experts_per_tok},
                                      {"projections", word(a.switch_heads.projections)},
                                      {"expert_width", a.switch_heads.expert_width}};
  if (experts) {
    j["shared_expert_intermediate_size"] = m.moe.shared_expert_intermediate_size;
    j["shared_expert_gate"] = m.moe.shared_expert_gate;
    j["router_z_loss_coefficient"] = m.moe.router_z_loss_coefficient;
    j["load_balance_scope"] = word(m.moe.load_balance.scope);
  }
  return j;
}

}  // namespace sluice
