#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/config.h"

namespace sluice {

/// config.json beside the weights, with Hugging Face's keys. A model without gates, sinks, sandwich norms and
/// clipping has the model_type of Qwen3 (of Llama without qk_norm; of Qwen3-MoE with experts but no shared
/// expert). Any other model has model_type "sluice" and lists its features.
nlohmann::json hf_config(const Config& config, int32_t end_of_document);

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
  ModelConfig model;  // keys absent from config.json have the defaults of the model type
  std::map<std::string, Spelling> spelled;  // by model key
  std::vector<Unsupported> unsupported;
  int64_t lora_rank = 0;
};

/// Reads the config.json of a model type that load_weights can load: Llama, Mistral, Qwen3, Qwen3-MoE, and
/// the type that hf_config writes. Both spellings of the rotary keys are accepted: rope_theta and
/// rope_scaling (transformers 4), rope_parameters (transformers 5). Throws Error(data) with file and key for
/// damaged contents and for any other model type, and Error(no_input) without a file.
HfModel read_hf_config(const std::string& path);

}  // namespace sluice
