#pragma once
// `sluice export`: a checkpoint as a Hugging Face folder in one of several formats.
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "hf/config.h"

namespace sluice {

struct ExportOptions {
  std::optional<HfFormat> format;  // nothing: the first native one that holds the model, otherwise sluice
  std::string dtype;               // "BF16" or "F32"; empty: as the checkpoint stores the weights
  std::string tokenizer;           // as for checkpoint_tokenizer
};

struct Exported {
  HfFormat format = HfFormat::sluice;
  std::vector<std::string> files;
  std::vector<std::string> warnings;
};

/// Writes model.safetensors, config.json, generation_config.json, tokenizer files, a model card README.md
/// with the validation results of the run, and for the format sluice modeling_sluice.py and
/// configuration_sluice.py. The files appear together or not at all. Error(usage) with every reason by name
/// where the format does not hold the model (hf/holds.h); Error(cannot_create) where a file exists.
Exported export_model(const CheckpointInfo& checkpoint, const std::string& folder,
                      const ExportOptions& options);

}  // namespace sluice
