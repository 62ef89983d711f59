#pragma once
// The source of the initial weights (train.init_from), and the check that the configuration computes the
// function that they were trained for.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/weight_map.h"
#include "comm/communicator.h"
#include "config/load.h"
#include "data/tokenizer.h"
#include "hf/config.h"

namespace sluice {

struct InitSource {
  std::string
      path;  // of the weights: one checkpoint, a folder or a .safetensors file; empty: from train.seed
  HfFormat format = HfFormat::sluice;  // of the files, as of a checkpoint
  WeightMap map;                       // how their files name and order the tensors
  std::string kind;                    // "checkpoint", "Hugging Face" or "weights without a configuration"
  int64_t step = -1;                   // of a checkpoint
  std::string model_type;              // of config.json
  std::string fingerprint;             // XXH3-128 of a checkpoint's manifest, or of the files of weights
  std::string data;                    // fingerprint of what a checkpoint was trained on
  uint64_t seed = 0;                   // train.seed of a checkpoint
  std::string tokenizer;               // empty: compared and equal; else why it was not compared
  std::vector<std::string>
      accepted;  // differences accepted by train.init_ignore: "model.rope.theta: 10000 -> 1000000"

  /// "runs/base/ckpt/step_00001000 (checkpoint, step 1000, ...)", with the accepted differences.
  std::string text() const;
  nlohmann::ordered_json json() const;
  /// Whether a training with this seed on this data begins with samples that the weights were trained on, in
  /// the same order.
  bool begins_alike(const Config& config, const std::string& data_fingerprint) const {
    return step > 0 && data == data_fingerprint && seed == config.train.seed;
  }
};

/// Finds the weights of train.init_from (for a run, its newest valid checkpoint) and compares their
/// configuration, config.yaml or config.json, with this one: every model key that changes the function, and
/// the tokenizer. Throws Error(usage) that lists all differences not accepted by train.init_ignore, each with
/// both values, their places and the name that accepts it. With train.init_missing: fresh, features whose new
/// parameters keep the function (train/fresh_start.h) are no difference. Error(data) if their configuration
/// is missing, damaged, or of an unknown model. Weights are read only for the fingerprint, and only by rank
/// 0. Collective with `ranks`.
InitSource find_init_source(const Config& config, const KeyPlaces& places, const Tokenizer& tokenizer,
                            Communicator* ranks = nullptr);

}  // namespace sluice
