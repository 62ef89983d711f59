#pragma once
// A training from its configuration to its last checkpoint: `sluice train`.
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
  /// Those that train together; null: alone. All are given the same options, and return the same; rank 0
  /// tells and writes.
  Communicator* ranks = nullptr;
  /// Caught since before the ranks were; null: from now on.
  const StopSignals* signals = nullptr;
};

/// Fills what only the tokenizer (vocab_size) and the parameter match (intermediate_size) know.
void resolve_model(Config& config, const Tokenizer& tokenizer);

/// Trains, or resumes from the newest valid checkpoint of the run folder. Returns ok or preempted; throws
/// Error for the rest. Nothing is written before configuration, data and checkpoints have been found good.
ExitCode run_training(const RunOptions& options);

}  // namespace sluice
