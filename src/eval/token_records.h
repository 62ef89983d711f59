#pragma once
// Losses and logits of single tokens, for programs that compare models token by token.
#include <string>

#include "eval/trained_model.h"

namespace sluice {

struct TokenRecordFiles {
  std::string losses;  // (samples, seq_len) nats; NaN where there is no target
  std::string logits;  // (samples, seq_len, vocab_size)
};

/// Runs the model over the samples of a set, in file order and in the micro-batches of an evaluation, up to
/// max_tokens in whole samples (0: all), and writes what is asked for as NumPy arrays: f64 for a model of
/// precision f64, otherwise f32. Error(usage) if an array would be larger than 4 GiB; Error(data) if the set
/// has no sample. zeroing: as in evaluations (nn/sequence.h); nullptr: none.
void write_token_records(const TrainedModel& trained, const DataSource& set, int64_t max_tokens,
                         const TokenRecordFiles& files, const ValueZeroing* zeroing = nullptr);

}  // namespace sluice
