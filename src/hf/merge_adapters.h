#pragma once
#include <string>

#include "checkpoint/store.h"

namespace sluice {

/// Writes the model of a checkpoint as a Hugging Face folder (model.safetensors, config.json,
/// tokenizer.model) with its adapters (lora) merged into the weights: W + (alpha / rank) B A, computed in f64
/// and rounded once. Tensors without adapter keep their bits. Returns the number of merged matrices.
/// Error(usage) if the checkpoint has no adapters; Error(cannot_create) if one of the files exists.
/// tokenizer: as for checkpoint_tokenizer.
int64_t merge_adapters(const CheckpointInfo& checkpoint, const std::string& folder,
                       const std::string& tokenizer = "");

}  // namespace sluice
