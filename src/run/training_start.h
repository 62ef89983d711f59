#pragma once
// The start of a training up to the point where its memory is taken: what can be found wrong is found here,
// and nothing is written before it.
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "comm/communicator.h"
#include "config/config.h"
#include "data/loader.h"
#include "data/tokenizer.h"
#include "eval/evaluate.h"
#include "plan/plan.h"
#include "run/init_source.h"
#include "run/run.h"
#include "run/run_folder.h"

namespace sluice {

/// What a training begins or resumes with, equal on all ranks but for `folder`.
struct TrainingStart {
  Config config;
  std::string config_yaml;  // all of it, as checkpoints keep it
  Plan plan;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Blend> data;
  std::unique_ptr<Evaluator> evaluator;
  std::unique_ptr<RunFolder> folder;  // rank 0's
  CheckpointInfo resumed;             // path empty: a fresh start
  InitSource init;                    // of a fresh start
  std::vector<std::string> idle;      // settings that are given and have no effect
  /// Of the whole run: {step, key, before, after} of every key that --allow-change let differ when it
  /// resumed.
  nlohmann::ordered_json changes = nlohmann::ordered_json::array();

  bool resumes() const { return !resumed.path.empty(); }
};

/// Collective. Reads configuration, tokenizer and data, compares them between ranks, checks memory and disk,
/// takes the run folder, and finds the checkpoint to go on from. Error on all ranks where anything is wrong.
TrainingStart prepare_training(const RunOptions& options, Communicator& ranks);

}  // namespace sluice
