#pragma once
// The model types that Sluice can load, with transformers' defaults for keys that a config.json leaves out,
// and keys that it cannot.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "config/model.h"

namespace sluice {

constexpr const char* kOwnType = "sluice";

/// A supported model type, with transformers' defaults for absent keys. 0 means: for key/value heads, the
/// number of query heads; for head_dim, hidden_size / num_attention_heads.
struct ModelType {
  const char *name, *architecture;
  int64_t vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
      num_key_value_heads, head_dim;
  bool qk_norm, experts;
  bool attention_bias;  // whether its code reads that key
};
constexpr ModelType kTypes[] = {
    {"llama", "LlamaForCausalLM", 32000, 4096, 11008, 32, 32, 0, 0, false, false, true},
    {"mistral", "MistralForCausalLM", 32000, 4096, 14336, 32, 32, 8, 0, false, false, false},
    {"qwen3", "Qwen3ForCausalLM", 151936, 4096, 22016, 32, 32, 32, 128, true, false, true},
    {"qwen3_moe", "Qwen3MoeForCausalLM", 151936, 2048, 6144, 24, 32, 4, 0, true, true, true},
    {"qwen3_next", "Qwen3NextForCausalLM", 151936, 2048, 5632, 48, 16, 2, 256, true, true, false},
    {"gpt_oss", "GptOssForCausalLM", 201088, 2880, 2880, 36, 64, 8, 64, false, true, true},
    {kOwnType, "SluiceForCausalLM", 0, 256, 768, 4, 4, 2, 64, true, true, true},
};
constexpr int64_t kWindow = 4096, kGptOssWindow = 128;
constexpr double kGptOssTheta = 150000;
constexpr double kGptOssSlope = 1.702;  // of the gate within the sigmoid (ops/activation.h)
constexpr RopeScalingConfig kGptOssScaling = {RopeScalingType::yarn, 32, 4096, 32, 1, false};

/// Reasons why other common model types are not supported, by the beginning of their names.
constexpr struct {
  std::string_view prefix, reason;
} kUnreadable[] = {
    {"gemma", "its norms multiply by 1 + w and its embeddings are scaled"},
    {"qwen2", "its queries, keys and values have biases"},
    {"gpt2", "it has learned positions, biases and LayerNorm"},
    {"gpt_neox", "it has LayerNorm, biases and a parallel feed-forward network"},
    {"mixtral", "its experts are named otherwise"},
    {"phi", "its projections are stored together"},
};

/// Keys that change the function unless they are null or have the value given here.
struct NeutralKey {
  const char* key;
  nlohmann::json neutral;
  const char* accepted_by;  // as in HfModel::Unsupported
};
inline const NeutralKey kNeutral[] = {
    {"quantization_config", nullptr, ""},
    {"attention_bias", false, ""},
    {"mlp_bias", false, ""},
    {"qkv_bias", false, ""},
    {"use_bias", false, ""},
    {"hidden_activation", nullptr, "model.hidden_act"},
    {"partial_rotary_factor", 1, "model.rope"},
    {"no_rope_layers", nullptr, "model.rope"},
    {"no_rope_layer_interval", nullptr, "model.rope"},
    {"original_max_position_embeddings", nullptr, "model.rope.scaling"},
    {"rope_interleaved", false, "model.rope"},
    {"attention_chunk_size", nullptr, "model.attention"},
    {"attn_logit_softcapping", nullptr, "model.attention"},
    {"attn_temperature_tuning", false, "model.attention"},
    {"attention_multiplier", nullptr, "model.attention"},
    {"query_pre_attn_scalar", nullptr, "model.attention"},
    {"clip_qkv", nullptr, "model.attention"},
    {"embedding_multiplier", 1, "model"},
    {"residual_multiplier", 1, "model"},
    {"logits_scaling", 1, "model"},
    {"logit_scale", 1, "model"},
    {"scale_emb", 1, "model"},
    {"scale_depth", nullptr, "model"},
    {"swiglu_limit", nullptr, "model"},
    {"use_parallel_residual", false, "model"},
};

}  // namespace sluice
