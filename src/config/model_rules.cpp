#include "config/model_rules.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "config/attention_rules.h"
#include "config/gate_rules.h"
#include "core/score_range.h"

namespace sluice {
namespace {

constexpr int64_t kMaxLayers = 10000;

void check_sizes(const ModelConfig& m, const DataConfig& data, Checks& check) {
  check.size("model.vocab_size", m.vocab_size, 0);
  check.require(
      m.vocab_size == 0 || data.tokenizer.type != TokenizerType::byte || m.vocab_size >= 257,
      {"model.vocab_size", "data.tokenizer.type"},
      fmt::format("model.vocab_size is {}, but the byte tokenizer has 257 tokens; use 0 or at least 257",
                  m.vocab_size));
  check.size("model.hidden_size", m.hidden_size);
  check.size("model.num_hidden_layers", m.num_hidden_layers);
  check.require(m.num_hidden_layers <= kMaxLayers || m.num_hidden_layers > kMaxSize,
                {"model.num_hidden_layers"},
                fmt::format("model.num_hidden_layers = {} is above the {} that this version is built for",
                            m.num_hidden_layers, kMaxLayers));
  check.size("model.num_attention_heads", m.num_attention_heads);
  check.size("model.num_key_value_heads", m.num_key_value_heads);
  check.size("model.head_dim", m.head_dim);
  check.size("model.intermediate_size", m.intermediate_size);
  if (m.num_attention_heads > 0 && m.num_key_value_heads > 0) {
    std::string fits;
    for (int64_t k = 1; k <= std::min<int64_t>(m.num_attention_heads, 64); ++k)
      if (m.num_attention_heads % k == 0) fits += fmt::format("{}{}", fits.empty() ? "" : ", ", k);
    check.require(
        m.num_attention_heads % m.num_key_value_heads == 0,
        {"model.num_key_value_heads", "model.num_attention_heads"},
        fmt::format("model.num_key_value_heads = {} does not divide num_attention_heads = {}; possible: {}",
                    m.num_key_value_heads, m.num_attention_heads, fits));
  }
  check.require(m.head_dim <= 0 || m.head_dim % 2 == 0, {"model.head_dim"},
                fmt::format("model.head_dim must be even (rotary pairs), got {}", m.head_dim));
  check.require(m.num_attention_heads <= 0 || m.num_attention_heads > kMaxSize || m.head_dim <= 0 ||
                    m.head_dim <= kMaxSize / m.num_attention_heads,
                {"model.num_attention_heads", "model.head_dim"},
                fmt::format("model.num_attention_heads = {} heads of head_dim = {} are too large together",
                            m.num_attention_heads, m.head_dim));
}

void check_initializer(const ModelConfig& m, Checks& check) {
  check.positive("model.initializer_range", m.initializer_range);
  const bool fan_in = m.initializer == Initializer::fan_in;
  check.require(!fan_in || !m.tie_word_embeddings, {"model.initializer", "model.tie_word_embeddings"},
                "model.initializer: fan_in initialises the embedding with deviation 1 and the output head "
                "with 0, so they "
                "cannot be one matrix; set tie_word_embeddings: false");
  check.require(
      !fan_in || !m.scaled_residual_init, {"model.scaled_residual_init", "model.initializer"},
      "model.scaled_residual_init has no effect with initializer: fan_in, which initialises o_proj and "
      "down_proj to 0");
}

void check_rope(const ModelConfig& m, Checks& check) {
  check.require(m.rope.theta > 1, {"model.rope.theta"},
                fmt::format("model.rope.theta must be greater than 1, got {}", m.rope.theta));
  const RopeScalingConfig& scaling = m.rope.scaling;
  check.require(scaling.factor >= 1, {"model.rope.scaling.factor"},
                fmt::format("model.rope.scaling.factor must be at least 1, got {}", scaling.factor));
  check.require(scaling.type != RopeScalingType::none || scaling.factor <= 1,
                {"model.rope.scaling.factor", "model.rope.scaling.type"},
                fmt::format("model.rope.scaling.factor = {} has no effect while type is none; set type: yarn",
                            scaling.factor));
  check.require(
      scaling.type == RopeScalingType::none || scaling.factor != 1,
      {"model.rope.scaling.type", "model.rope.scaling.factor"},
      "model.rope.scaling.type: yarn changes nothing while factor is 1; set the factor by which positions "
      "are stretched");
  check.size("model.rope.scaling.original_max_position_embeddings", scaling.original_max_position_embeddings);
  check.positive("model.rope.scaling.beta_slow", scaling.beta_slow);
  if (scaling.attention_factor)
    check.positive("model.rope.scaling.attention_factor", *scaling.attention_factor);
  check.require(scaling.beta_fast > scaling.beta_slow,
                {"model.rope.scaling.beta_fast", "model.rope.scaling.beta_slow"},
                fmt::format("model.rope.scaling.beta_fast = {} must be greater than beta_slow = {}",
                            scaling.beta_fast, scaling.beta_slow));
}

void check_model(const ModelConfig& m, const DataConfig& data, Checks& check) {
  check_sizes(m, data, check);
  check.positive("model.rms_norm_eps", m.rms_norm_eps);
  if (m.branch_clip) check.positive("model.branch_clip", *m.branch_clip);
  check.not_negative("model.logit_z_loss_coefficient", m.logit_z_loss_coefficient);
  if (m.final_logit_softcapping) check.positive("model.final_logit_softcapping", *m.final_logit_softcapping);
  check.require(m.qk_norm || m.qk_norm_order == QkNormOrder::before_rope,
                {"model.qk_norm_order", "model.qk_norm"},
                "model.qk_norm_order: after_rope has no effect while qk_norm is false");
  check_initializer(m, check);
  if (m.max_position_embeddings) {
    check.size("model.max_position_embeddings", *m.max_position_embeddings);
    check.require(*m.max_position_embeddings <= 0 || data.seq_len <= *m.max_position_embeddings,
                  {"data.seq_len", "model.max_position_embeddings"},
                  fmt::format("data.seq_len = {} is longer than model.max_position_embeddings = {}",
                              data.seq_len, *m.max_position_embeddings));
  }
  check.size("model.match_multiple", m.match_multiple);
  check_rope(m, check);
  check_gates(m, check);
  check_attention(m, check);
}

void check_switch_heads(const ModelConfig& m, Checks& check) {
  const SwitchHeadsConfig& s = m.attention.switch_heads;
  const std::string keys = "model.attention.switch_heads";
  const std::string experts = keys + ".num_experts", chosen = keys + ".num_experts_per_tok",
                    width = keys + ".expert_width";
  check.size(experts, s.num_experts, 0);
  check.size(chosen, s.num_experts_per_tok);
  check.size(width, s.expert_width, 0);
  if (s.num_experts < 0 || s.num_experts_per_tok < 1 || s.expert_width < 0 || m.head_dim < 1) return;
  if (s.num_experts == 0) {
    const SwitchHeadsConfig none;
    const auto no_effect = [&](const std::string& key, bool given) {
      check.require(!given, {key, experts}, key + " has no effect while num_experts is 0");
    };
    no_effect(chosen, s.num_experts_per_tok != none.num_experts_per_tok);
    no_effect(width, s.expert_width != none.expert_width);
    no_effect(keys + ".projections", s.projections != none.projections);
    return;
  }
  check.require(
      s.num_experts <= kMaxExperts, {experts},
      fmt::format("{} = {} is above the {} that routers are built for", experts, s.num_experts, kMaxExperts));
  check.require(
      s.num_experts_per_tok <= s.num_experts, {chosen, experts},
      fmt::format("{} = {} is more than num_experts = {}", chosen, s.num_experts_per_tok, s.num_experts));
  check.require(s.num_experts_per_tok <= kMaxExpertsPerToken, {chosen},
                fmt::format("{} = {} is above the {} that routers are built for", chosen,
                            s.num_experts_per_tok, kMaxExpertsPerToken));
  if (s.expert_width == 0) return;
  check.require(
      m.head_dim % s.expert_width == 0, {width, "model.head_dim"},
      fmt::format("{} = {} does not divide model.head_dim = {}", width, s.expert_width, m.head_dim));
  if (s.num_experts > kMaxExperts || s.expert_width > m.head_dim || m.head_dim > kMaxSize)
    return;  // reported
  check.require(
      s.num_experts * s.expert_width >= m.head_dim, {width, experts},
      fmt::format("{} = {}: {} experts never write the last {} of a head's {} channels", width,
                  s.expert_width, s.num_experts, m.head_dim - s.num_experts * s.expert_width, m.head_dim));
}

void check_moe(const ModelConfig& m, Checks& check) {
  const MoeConfig& e = m.moe;
  check.size("model.moe.num_experts", e.num_experts, 0);
  check.size("model.moe.num_experts_per_tok", e.num_experts_per_tok);
  check.size("model.moe.moe_intermediate_size", e.moe_intermediate_size);
  check.size("model.moe.shared_expert_intermediate_size", e.shared_expert_intermediate_size, 0);
  check.size("model.moe.decoder_sparse_step", e.decoder_sparse_step);
  check.not_negative("model.moe.load_balance.coefficient", e.load_balance.coefficient);
  check.not_negative("model.moe.router_z_loss_coefficient", e.router_z_loss_coefficient);
  check.require(
      e.num_experts != 1, {"model.moe.num_experts"},
      "model.moe.num_experts = 1 is a dense network; use 0 and intermediate_size, or at least 2 experts");
  if (e.swiglu_limit) check.positive("model.moe.swiglu_limit", *e.swiglu_limit);
  if (e.num_experts == 0) {
    check.require(!e.bias, {"model.moe.bias", "model.moe.num_experts"},
                  "model.moe.bias has no effect while num_experts is 0");
    check.require(!e.swiglu_limit, {"model.moe.swiglu_limit", "model.moe.num_experts"},
                  "model.moe.swiglu_limit has no effect while num_experts is 0");
  }
  if (e.num_experts <= 1 || e.decoder_sparse_step <= 0) return;
  check.require(
      m.hidden_act == HiddenAct::silu, {"model.hidden_act", "model.moe.num_experts"},
      "model.hidden_act: relu2 is for dense networks; experts are SwiGLU in this version: use silu");
  check.require(e.num_experts <= kMaxExperts, {"model.moe.num_experts"},
                fmt::format("model.moe.num_experts = {} is above the {} that routers are built for",
                            e.num_experts, kMaxExperts));
  check.require(e.num_experts_per_tok <= e.num_experts,
                {"model.moe.num_experts_per_tok", "model.moe.num_experts"},
                fmt::format("model.moe.num_experts_per_tok = {} is more than num_experts = {}",
                            e.num_experts_per_tok, e.num_experts));
  check.require(e.num_experts_per_tok <= kMaxExpertsPerToken, {"model.moe.num_experts_per_tok"},
                fmt::format("model.moe.num_experts_per_tok = {} is above the {} that routers are built for",
                            e.num_experts_per_tok, kMaxExpertsPerToken));
  check.require(!e.shared_expert_gate || e.shared_expert_intermediate_size > 0,
                {"model.moe.shared_expert_gate", "model.moe.shared_expert_intermediate_size"},
                "model.moe.shared_expert_gate needs a shared expert; give shared_expert_intermediate_size");
  int64_t with_experts = 0;
  for (int64_t layer = 0; layer < std::min<int64_t>(m.num_hidden_layers, 1 << 16); ++layer)
    with_experts += e.in_layer(layer);
  if (m.num_hidden_layers <= 0) return;  // reported
  for (const int64_t layer : e.mlp_only_layers)
    check.require(layer >= 0 && layer < m.num_hidden_layers,
                  {"model.moe.mlp_only_layers", "model.num_hidden_layers"},
                  fmt::format("model.moe.mlp_only_layers names layer {}, but layers are 0 to {}", layer,
                              m.num_hidden_layers - 1));
  check.require(
      with_experts > 0, {"model.moe.num_experts"},
      fmt::format(
          "model.moe.num_experts = {}, but decoder_sparse_step and mlp_only_layers leave no layer with "
          "experts; set num_experts: 0 for a dense model",
          e.num_experts));
}

/// "sigmoid or ns_sigmoid": the activations whose scores are in [0, 1].
std::string activations_in_range() {
  std::string names;
  for (size_t i = 0; i < EnumNames<GateActivation>::names.size(); ++i)
    if (score_range(static_cast<GateActivation>(i)))
      names += (names.empty() ? "" : " or ") + std::string(EnumNames<GateActivation>::names[i]);
  return names;
}

/// A head's importance is measured by the scores of the first gate at sdpa_output, if there is one. They must
/// multiply, lie in [0, 1] and be separate for each head.
void check_head_balance(const Config& c, Checks& check) {
  const ModelConfig& m = c.model;
  const HeadBalanceConfig& b = m.attention.head_balance;
  const std::string at = "model.attention.head_balance.";
  check.not_negative(at + "coefficient", b.coefficient);
  check.count(at + "shared_heads", b.shared_heads);
  check.size(at + "calibration_samples", b.calibration_samples);
  check.require(b.ddof == 0 || b.ddof == 1, {at + "ddof"},
                fmt::format("{}ddof must be 0 or 1, got {}", at, b.ddof));
  if (!(b.coefficient > 0)) return;
  check.require(
      m.num_attention_heads <= 0 || b.shared_heads < 0 || m.num_attention_heads - b.shared_heads >= 2,
      {at + "shared_heads", "model.num_attention_heads"},
      fmt::format("{}shared_heads = {} leaves fewer than 2 of {} heads to balance", at, b.shared_heads,
                  m.num_attention_heads));
  check.require(
      m.num_attention_heads <= 1024, {"model.num_attention_heads"},
      fmt::format("model.num_attention_heads = {} is above the 1024 that {}coefficient is built for",
                  m.num_attention_heads, at));
  check.require(
      c.parallel.determinism != Determinism::exact || b.scope == HeadBalanceScope::micro_batch ||
          b.scope == HeadBalanceScope::previous_step,
      {at + "scope", "parallel.determinism"},
      at + "scope depends on which rank computes which micro-batch; with parallel.determinism: exact use "
           "micro_batch or previous_step");
  for (size_t i = 0; i < m.attention.gates.size(); ++i) {
    const GateConfig& gate = m.attention.gates[i];
    if (gate.position != GatePosition::sdpa_output) continue;
    const std::string key = fmt::format("model.attention.gates[{}]", i);
    const std::string tail =
        ", so they do not measure a head's importance; set " + at + "coefficient: 0, or ";
    check.require(score_range(gate.activation).has_value(), {key + ".activation", at + "coefficient"},
                  key + ".activation: scores are not in [0, 1]" + tail + "use " + activations_in_range());
    check.require(gate.combine == GateCombine::multiply, {key + ".combine", at + "coefficient"},
                  key + ".combine: scores are added" + tail + "use multiply");
    check.require(gate.heads == GateSharing::specific, {key + ".heads", at + "coefficient"},
                  key + ".heads: all heads have the same scores" + tail + "use specific");
    return;
  }
}

}  // namespace

void check_model_rules(const Config& config, Checks& check) {
  check_model(config.model, config.data, check);
  check_switch_heads(config.model, check);
  check_moe(config.model, check);
  check_head_balance(config, check);
}

}  // namespace sluice
