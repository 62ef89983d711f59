#pragma once
#include <string>

#include "checkpoint/store.h"

namespace sluice {

/// Writes the model of a checkpoint as a Hugging Face folder (model.safetensors, config.json,
/// tokenizer.model), its adapters (lora) merged into what they stand beside: W + (alpha / rank) B A, computed
/// in f64 and rounded once. What has no adapter keeps its bits. Returns how many matrices were merged.
/// Error(usage) where the checkpoint has no adapters; Error(cannot_create) where one of the files exists;
/// tokenizer: as in checkpoint_tokenizer.
int64_t merge_adapters(const CheckpointInfo& checkpoint, const std::string& folder,
                       const std::string& tokenizer = "");

}  // namespace sluice
