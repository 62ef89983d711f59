#pragma once
// What a training needs to be equal on all its ranks (run/start_agreement.h).
#include "config/config.h"
#include "eval/evaluate.h"
#include "run/start_agreement.h"

namespace sluice {

/// The program and the libraries that compute, by what their linker derived from their contents.
void state_program(StartFacts& facts);
/// Every key but name, train.threads and train.device, and but paths, behind which the contents count. Later
/// calls replace what earlier ones stated.
void state_configuration(StartFacts& facts, const Config& config);
/// Where it is computed and with which instructions.
void state_device(StartFacts& facts, const Config& config);
/// What the data files and the file or folder of train.init_from hold.
void state_data(StartFacts& facts, const Config& config, const Blend& training, const Evaluator& evaluator);
/// Collective, once every rank has set its number of threads: that these are equal where parallel.determinism
/// is exact. Other numbers of threads agree to rounding, and `exact` promises more.
void agree_on_threads(Communicator& ranks, const Config& config);
/// Collective: that all ranks see, in the folder of checkpoints, the one that rank 0 finds the newest there.
/// wait_seconds: as of StartFacts.
void agree_on_checkpoint(Communicator& ranks, const std::string& folder, double wait_seconds);

}  // namespace sluice
