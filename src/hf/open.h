#pragma once
// Opens what `sluice eval`, `analyze`, `generate` and `import` are given: a run, a checkpoint, or a Hugging
// Face folder.
#include <string>
#include <vector>

#include "eval/trained_model.h"
#include "hf/config.h"
#include "hf/idle_overrides.h"

namespace sluice {

struct OpenOptions {
  std::vector<std::string> overrides;  // "key=value"
  std::string device;                  // as for checkpoint_config
  std::string tokenizer;               // as for checkpoint_tokenizer
  ModelUse use = ModelUse::text;       // what overrides are read for
};

/// Whether a path is a folder with config.json and weights, and neither a checkpoint nor a run.
bool is_hf_folder(const std::string& path);

/// A configuration with the model of a Hugging Face folder, its tokenizer where it is known, and defaults
/// everywhere else; data.seq_len is the model's length, at most 1024 tokens.
Config hf_folder_config(const std::string& folder, const HfModel& model);

/// The model at a path and its tokenizer. Error(usage) for a Hugging Face folder that says what Sluice does
/// not have, which is named (config.json key and value), or whose tokenizer is not known and not given.
ModelFiles open_model(const std::string& path, const OpenOptions& options);

}  // namespace sluice
