#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/config.h"

namespace sluice {

/// config.json beside the weights, with Hugging Face's keys. A model without gates, sinks, sandwich norms and
/// clipping is a Qwen3 (a Llama without qk_norm; with experts, none of them shared, a Qwen3-MoE) and says so;
/// any other is of model_type "sluice" and lists what it has.
nlohmann::json hf_config(const Config& config, int32_t end_of_document);

/// What a config.json says of the function that the weights beside it were trained for.
struct HfModel {
  struct Spelling {
    std::string key;     // in config.json: "rope_parameters.rope_theta"
    bool given = false;  // otherwise the value is the model type's default
  };
  /// A value that no configuration of this program stands for.
  struct Unsupported {
    std::string what;         // "sliding_window = 4096"
    std::string accepted_by;  // the model key whose name in train.init_ignore accepts it; empty: none does
  };
  std::string model_type;
  ModelConfig model;                        // what is not told by config.json is as the model type has it
  std::map<std::string, Spelling> spelled;  // by model key
  std::vector<Unsupported> unsupported;
  int64_t lora_rank = 0;
};

/// Reads the config.json of a model type that load_weights can load: Llama, Mistral, Qwen3, Qwen3-MoE, and
/// what hf_config writes. Both spellings of the rotary keys are read: rope_theta and rope_scaling
/// (transformers 4), rope_parameters (5). Throws Error(data), which names file and key, for damaged contents
/// and for any other model type, and Error(no_input) without a file.
HfModel read_hf_config(const std::string& path);

}  // namespace sluice
