#pragma once
// Where a training's first weights come from (train.init_from), and whether the configuration computes the
// function that they were trained for.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "config/load.h"
#include "data/tokenizer.h"

namespace sluice {

struct InitSource {
  std::string
      path;  // of the weights: one checkpoint, a folder or a .safetensors file; empty: from train.seed
  std::string kind;         // "checkpoint", "Hugging Face" or "weights without a configuration"
  int64_t step = -1;        // of a checkpoint
  std::string model_type;   // of config.json
  std::string fingerprint;  // XXH3-128 of a checkpoint's manifest, or of the files of weights
  std::string tokenizer;    // empty: compared and equal; else why it was not compared
  std::vector<std::string>
      accepted;  // differences that train.init_ignore names: "model.rope.theta: 10000 -> 1000000"

  /// "runs/base/ckpt/step_00001000 (checkpoint, step 1000, ...)", with the accepted differences.
  std::string text() const;
  nlohmann::ordered_json json() const;
};

/// Finds the weights that train.init_from stands for (of a run the newest valid checkpoint) and compares what
/// their configuration says, config.yaml or config.json, with this one: every model key that changes the
/// function, and the tokenizer. Throws Error(usage) that lists all differences that train.init_ignore does
/// not name, each with both values, where they stand, and the name that accepts it; Error(data) where the
/// configuration there is missing, damaged, or of a model that is not known here. Reads no weights but for
/// the fingerprint, which rank 0 alone takes. Collective with `ranks`.
InitSource find_init_source(const Config& config, const KeyPlaces& places, const Tokenizer& tokenizer,
                            Communicator* ranks = nullptr);

}  // namespace sluice
