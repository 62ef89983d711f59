#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"

namespace sluice {

/// Formats of a Hugging Face folder: keys of config.json, and names and order of the tensors (hf/layouts.h).
/// gated_attention: of the Gated Attention paper's repository (qiuzh20/gated_attention). sluice: every
/// feature, for modeling_sluice.py, under the names of the checkpoints.
enum class HfFormat : uint8_t { llama, qwen3, qwen3_moe, qwen3_next, gpt_oss, gated_attention, sluice };
SLUICE_ENUM_NAMES(HfFormat, "llama", "qwen3", "qwen3_moe", "qwen3_next", "gpt_oss", "gated_attention",
                  "sluice");

/// config.json beside the weights of a checkpoint, with Hugging Face's keys: in the format of llama, qwen3 or
/// qwen3_moe if one of them holds the model under the names of the checkpoint, otherwise of sluice, which
/// lists its features. end_of_document: its eos_token_id; none, if no tokenizer says it.
nlohmann::json hf_config(const Config& config, std::optional<int32_t> end_of_document);
/// The same in a given format, whether or not it holds the model (hf/holds.h).
nlohmann::json hf_config(const Config& config, std::optional<int32_t> end_of_document, HfFormat format);
/// The number of a token in config.json, or null.
nlohmann::json hf_token(std::optional<int64_t> token);

/// The model function that a config.json describes.
struct HfModel {
  struct Spelling {
    std::string key;     // in config.json: "rope_parameters.rope_theta"
    bool given = false;  // otherwise the value is the model type's default
  };
  /// A value that has no counterpart in a Sluice configuration.
  struct Unsupported {
    std::string what;         // "sliding_window = 4096"
    std::string accepted_by;  // model key that accepts it when listed in train.init_ignore; empty: none
  };
  std::string model_type;
  HfFormat format = HfFormat::sluice;
  ModelConfig model;  // keys absent from config.json have the defaults of the model type
  std::map<std::string, Spelling> spelled;  // by model key
  std::vector<Unsupported> unsupported;
  int64_t lora_rank = 0;
  /// sluice_begin_token, which Sluice writes in every format, otherwise bos_token_id.
  std::optional<int64_t> begin_token;
  /// Whether it stands in front of every text, and none does without one: of what Sluice has written. Of
  /// others the tokenizer's files say whether it is put there (folder_begin_token).
  bool begin_stated = false;
  /// eos_token_id, the first where there are several.
  std::optional<int64_t> end_token;
};

/// Reads the config.json of a model type that Sluice can load: Llama, Mistral, Qwen3, Qwen3-MoE, Qwen3-Next
/// with full attention in every layer, gpt-oss, the gated Qwen3 of qiuzh20/gated_attention, and the type that
/// hf_config writes. Both spellings of the rotary keys are accepted: rope_theta and rope_scaling
/// (transformers 4), rope_parameters (transformers 5). Throws Error(data) with file and key for damaged
/// contents and for any other model type, and Error(no_input) without a file.
HfModel read_hf_config(const std::string& path);
/// The same of a parsed file; `path` is for messages.
HfModel parse_hf_config(const nlohmann::json& root, const std::string& path);

}  // namespace sluice
