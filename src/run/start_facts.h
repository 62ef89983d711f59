#pragma once
// The facts that must be equal on all ranks (run/start_agreement.h).
#include "config/config.h"
#include "eval/evaluate.h"
#include "run/start_agreement.h"

namespace sluice {

/// What tells weights apart without reading all of them: of a folder of weights, a run folder or a file, as
/// train.init_from accepts them.
std::string weights_fingerprint(const std::string& path);
/// The program and the libraries that take part in the computation, by the build identifiers of the linker.
void state_program(StartFacts& facts);
/// Every key except name, train.threads, train.device and paths, whose file contents are compared instead.
/// Later calls replace facts of earlier ones.
void state_configuration(StartFacts& facts, const Config& config);
/// The device and the instruction set.
void state_device(StartFacts& facts, const Config& config);
/// The contents of the files of a data set; name: how errors call it.
void state_contents(StartFacts& facts, const std::string& name, const Blend& data);
/// The contents of the data files and of the file or folder of train.init_from.
void state_data(StartFacts& facts, const Config& config, const Blend& training, const Evaluator& evaluator);
/// Collective, after every rank has set its number of threads: checks that they are equal if
/// parallel.determinism is exact, because results with different numbers of threads agree only up to
/// rounding.
void agree_on_threads(Communicator& ranks, const Config& config);
/// Collective: checks that all ranks see the checkpoint that is the newest one on rank 0. wait_seconds: as in
/// StartFacts.
void agree_on_checkpoint(Communicator& ranks, const std::string& folder, double wait_seconds);

}  // namespace sluice
