#pragma once
#include <nlohmann/json.hpp>

#include "config/config.h"

namespace sluice {

/// config.json beside the weights, with Hugging Face's keys. A model without gates, sinks, sandwich norms and
/// clipping is a Qwen3 (a Llama without qk_norm; with experts, none of them shared, a Qwen3-MoE) and says so;
/// any other is of model_type "sluice" and lists what it has.
nlohmann::json hf_config(const Config& config, int32_t end_of_document);

}  // namespace sluice
