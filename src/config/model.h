#pragma once
// The model: sizes, norms, positions, mixture of experts.
#include <optional>
#include <string>
#include <vector>

#include "config/attention.h"

namespace sluice {

enum class NormPlacement : uint8_t { pre, sandwich };
enum class RopeScalingType : uint8_t { none, yarn };
enum class HiddenAct : uint8_t { silu, relu2 };
enum class QkNormOrder : uint8_t { before_rope, after_rope };
enum class Initializer : uint8_t { normal, fan_in };
enum class BalanceScope : uint8_t { global_batch, micro_batch, previous_step };

SLUICE_ENUM_NAMES(NormPlacement, "pre", "sandwich");
SLUICE_ENUM_NAMES(RopeScalingType, "none", "yarn");
SLUICE_ENUM_NAMES(HiddenAct, "silu", "relu2");
SLUICE_ENUM_NAMES(QkNormOrder, "before_rope", "after_rope");
SLUICE_ENUM_NAMES(Initializer, "normal", "fan_in");
SLUICE_ENUM_NAMES(BalanceScope, "global_batch", "micro_batch", "previous_step");

struct RopeScalingConfig {
  RopeScalingType type = RopeScalingType::none;
  double factor = 1.0;
  int64_t original_max_position_embeddings = 4096;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;
  std::optional<double> attention_factor = {};

  template <class V>
  void fields(V& f) {
    f("type", type, "context extension of a pretrained model");
    f("factor", factor, "YaRN: new length / original length");
    f("original_max_position_embeddings", original_max_position_embeddings,
      "YaRN: length the model was trained at");
    f("beta_fast", beta_fast,
      "YaRN: dimensions that rotate more often than this within the original length keep their frequency");
    f("beta_slow", beta_slow,
      "YaRN: dimensions that rotate less often than this within the original length are fully interpolated");
    f("attention_factor", attention_factor,
      "YaRN: cosines and sines are multiplied by this, so attention's logits by its square; null: 0.1 "
      "ln(factor) + 1; 1: not at all");
    f("truncate", truncate,
      "YaRN: round the two dimensions at which interpolation begins and is full outwards to whole numbers "
      "(false: gpt-oss)");
  }
};

struct RopeConfig {
  double theta = 10000.0;
  RopeScalingConfig scaling;

  template <class V>
  void fields(V& f) {
    f("theta", theta, "base of the rotary frequencies");
    f("scaling", scaling, "");
  }
};

/// GatedNorm (Qiu et al. 2026, arXiv 2601.22966): the norm's output n becomes n * sigmoid(U silu(D n)).
struct GatedNormConfig {
  int64_t rank = 0;
  GateInit init = GateInit::matrix;

  template <class V>
  void fields(V& f) {
    f("rank", rank,
      "rows of D, columns of U: a low-rank gate on the norms before attention and before the feed-forward "
      "network; 0: none");
    f("init", init, "initial U: as every matrix (initializer), or zero, when the gate starts at 1/2");
  }
};

struct LoadBalanceConfig {
  double coefficient = 1e-2;
  BalanceScope scope = BalanceScope::global_batch;

  template <class V>
  void fields(V& f) {
    f("coefficient", coefficient, "weight of the load-balancing loss, which is 1 at perfect balance; 0: off");
    f("scope", scope,
      "tokens over which the experts' token fractions are counted: the optimizer step so far, one "
      "micro-batch, or the whole previous step");
  }
};

struct MoeConfig {
  int64_t num_experts = 0;
  int64_t num_experts_per_tok = 8;
  int64_t moe_intermediate_size = 768;
  bool norm_topk_prob = true;
  int64_t shared_expert_intermediate_size = 0;
  bool shared_expert_gate = false;
  bool bias = false;
  std::optional<double> swiglu_limit;
  int64_t decoder_sparse_step = 1;
  std::vector<int64_t> mlp_only_layers;
  LoadBalanceConfig load_balance;
  double router_z_loss_coefficient = 1e-3;

  template <class V>
  void fields(V& f) {
    f("num_experts", num_experts, "experts per MoE layer; 0: every feed-forward network is dense");
    f("num_experts_per_tok", num_experts_per_tok,
      "experts per token: those with the largest router probabilities; ties go to the lower index");
    f("moe_intermediate_size", moe_intermediate_size, "width of one expert");
    f("norm_topk_prob", norm_topk_prob, "divide the selected experts' probabilities by their sum");
    f("shared_expert_intermediate_size", shared_expert_intermediate_size,
      "width of the shared expert, which processes every token; 0: none");
    f("shared_expert_gate", shared_expert_gate,
      "scale the shared expert's output by a sigmoid gate computed from the hidden state (Qwen3-Next)");
    f("bias", bias,
      "learned biases of the router's logits and of the experts' projections, which start at 0 (gpt-oss); "
      "the "
      "shared expert has none");
    f("swiglu_limit", swiglu_limit,
      "c: experts compute g sigmoid(1.702 g) (u + 1) with g = min(gate, c), u = clamp(up, -c, c) (gpt-oss); "
      "null: silu(gate) up");
    f("decoder_sparse_step", decoder_sparse_step, "layer i is an MoE layer if i + 1 is a multiple of this");
    f("mlp_only_layers", mlp_only_layers,
      "layers, counted from 0, that are dense regardless of decoder_sparse_step");
    f("load_balance", load_balance, "");
    f("router_z_loss_coefficient", router_z_loss_coefficient,
      "weight of the router z-loss, the mean squared log-sum-exp of the router's logits (ST-MoE); 0: off");
  }

  /// Whether layer `i` is an MoE layer.
  bool in_layer(int64_t i) const {
    for (const int64_t dense : mlp_only_layers)
      if (dense == i) return false;
    return num_experts > 0 && (i + 1) % decoder_sparse_step == 0;
  }
};

struct ModelConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 256;
  int64_t num_hidden_layers = 4;
  int64_t num_attention_heads = 4;
  int64_t num_key_value_heads = 2;
  int64_t head_dim = 64;
  int64_t intermediate_size = 768;
  bool tie_word_embeddings = true;
  double rms_norm_eps = 1e-6;
  HiddenAct hidden_act = HiddenAct::silu;
  bool norm_weights = true;
  Initializer initializer = Initializer::normal;
  double initializer_range = 0.02;
  bool scaled_residual_init = false;
  bool attention_bias = false;
  bool qk_norm = true;
  QkNormOrder qk_norm_order = QkNormOrder::before_rope;
  bool embedding_norm = false;
  std::optional<double> final_logit_softcapping;
  double logit_z_loss_coefficient = 0.0;
  NormPlacement norm_placement = NormPlacement::pre;
  GatedNormConfig gated_norm;
  std::optional<double> branch_clip;
  std::optional<int64_t> max_position_embeddings;
  RopeConfig rope;
  AttentionConfig attention;
  MoeConfig moe;
  std::string match_parameters_of;
  int64_t match_multiple = 1;

  template <class V>
  void fields(V& f) {
    f("vocab_size", vocab_size, "0: the vocabulary size of the tokenizer");
    f("hidden_size", hidden_size, "");
    f("num_hidden_layers", num_hidden_layers, "");
    f("num_attention_heads", num_attention_heads, "");
    f("num_key_value_heads", num_key_value_heads, "divides num_attention_heads (grouped-query attention)");
    f("head_dim", head_dim, "even; independent of hidden_size / num_attention_heads");
    f("intermediate_size", intermediate_size, "width of the feed-forward network in dense layers");
    f("tie_word_embeddings", tie_word_embeddings, "the output head uses the embedding matrix");
    f("rms_norm_eps", rms_norm_eps, "");
    f("hidden_act", hidden_act, "silu: SwiGLU; relu2: down(relu(up x)^2), without a gate projection");
    f("norm_weights", norm_weights, "false: no RMSNorm has a weight");
    f("initializer", initializer,
      "fan_in (nanochat): standard deviation by matrix shape, embedding with deviation 1, output head and "
      "branch outputs 0");
    f("initializer_range", initializer_range, "initial standard deviation of every matrix, gates included");
    f("scaled_residual_init", scaled_residual_init,
      "initialise o_proj and down_proj with initializer_range / sqrt(2 layers)");
    f("attention_bias", attention_bias,
      "learned biases of the query, key, value and output projections, which start at 0");
    f("qk_norm", qk_norm, "RMSNorm of queries and keys per head");
    f("qk_norm_order", qk_norm_order, "position of this norm relative to the rotary embedding");
    f("embedding_norm", embedding_norm, "RMSNorm of the token embeddings before the first block");
    f("final_logit_softcapping", final_logit_softcapping, "c: logits become c tanh(logits / c)");
    f("logit_z_loss_coefficient", logit_z_loss_coefficient,
      "weight of the z-loss, the mean squared log-sum-exp of the output logits (PaLM); 0: off");
    f("norm_placement", norm_placement,
      "sandwich also normalises each branch's output before the residual addition");
    f("gated_norm", gated_norm, "");
    f("branch_clip", branch_clip,
      "clamp attention and feed-forward outputs to [-c, c] before the residual addition");
    f("max_position_embeddings", max_position_embeddings, "length of the rotary table; null: data.seq_len");
    f("rope", rope, "");
    f("attention", attention, "");
    f("moe", moe, "");
    f("match_parameters_of", match_parameters_of,
      "configuration whose parameter count this model matches by narrowing intermediate_size (with experts, "
      "moe_intermediate_size)");
    f("match_multiple", match_multiple, "the matched width is rounded down to a multiple of this");
  }
};

}  // namespace sluice
