#pragma once
// `sluice train`: a run from its configuration to its last checkpoint.
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "config/load.h"
#include "core/error.h"
#include "data/tokenizer.h"
#include "run/signals.h"

namespace sluice {

struct RunOptions {
  std::string config_path;
  std::vector<std::string> overrides;     // key=value
  std::vector<std::string> allow_change;  // trajectory keys that may differ from the checkpoint's
  std::string command_line;               // for RUN/cmdline.txt
  bool fresh = false;                     // refuse to resume
  /// The ranks that train together; null: a single rank. All get the same options and return the same result;
  /// rank 0 reports and writes.
  Communicator* ranks = nullptr;
  /// Signals caught since before the ranks were created; null: caught from now on.
  const StopSignals* signals = nullptr;
};

/// Fills in values that depend on the tokenizer (vocab_size) and the parameter match (intermediate_size).
void resolve_model(Config& config, const Tokenizer& tokenizer);

/// Trains, or resumes from the newest valid checkpoint in the run folder. Returns ok or preempted; throws
/// Error otherwise. Nothing is written before configuration, data and checkpoints have been checked.
ExitCode run_training(const RunOptions& options);

}  // namespace sluice
