#pragma once
// `sluice analyze`: a trained model reads validation sets, and what its layers did is added up
// (analysis/statistics.h).
#include "analysis/analysis.h"
#include "comm/communicator.h"
#include "eval/trained_model.h"

namespace sluice {

struct AnalyzeOptions {
  int64_t tokens = 16384;     // of every set, in whole samples; 0: all of it
  int64_t map_sequences = 8;  // that maps and planes show, taken in turn from the sets
  int64_t map_tokens = 64;    // of each, from its start; at most a sample's
};

/// Reads the samples of each set in file order, one forward pass each, twice where figures need means first;
/// the last, padded sample of a file is left out, and with a document mask every sample whose end is a
/// document's. data: seq_len and document_mask are its. Several ranks share the samples and get the same
/// result, bit for bit: sums are merged in the order of the samples. (Maps are rank 0's alone.) checkpoint
/// and step of the result are the caller's to fill in. Error(usage): seq_len is beyond the model's positions.
/// Error(data): no whole sample.
Analysis analyze(const TrainedModel& trained, const std::vector<DataSource>& sets, const DataConfig& data,
                 const AnalyzeOptions& options, Communicator& ranks);

}  // namespace sluice
