#pragma once
// The files of a run folder that say what was started: config.yaml, config.input.yaml, cmdline.txt, run.json
// and the tokenizer.
#include "run/training_start.h"
#include "train/trainer.h"

namespace sluice {

/// Writes them, before the first step. Error where one cannot be written: nothing has been trained yet.
void write_start_files(const RunOptions& options, const TrainingStart& start, const Trainer& trainer);

/// For a start that finds its training finished: status.json says so, which that of a training that was
/// killed behind its last evaluation does not.
void write_finished_status(const TrainingStart& start);

}  // namespace sluice
