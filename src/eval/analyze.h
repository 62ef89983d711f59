#pragma once
// `sluice analyze`: runs a trained model over validation sets and accumulates statistics of its layers
// (analysis/statistics.h).
#include "analysis/analysis.h"
#include "comm/communicator.h"
#include "eval/trained_model.h"

namespace sluice {

struct AnalyzeOptions {
  int64_t tokens = 16384;     // per set, in whole samples; 0: all
  int64_t map_sequences = 8;  // sequences in maps and planes, taken from the sets in turn
  int64_t map_tokens = 64;    // first tokens of each sequence; at most one sample
  AnalysisConfig measures = {};
};

/// Runs one forward pass per sample, in file order, and a second one if statistics need the means first.
/// Samples that end in padding (the last of a file; with packing by documents, many) are left out and
/// counted. seq_len, document_mask and begin_token come from data. ranks: divide the samples and get bitwise
/// equal results, because sums are merged in the order of the samples (only rank 0 of them has maps). Where
/// ranks share the model's sequences (TrainedModel), the results are equal but for the rounding of sums over
/// tokens, on each of them. The caller fills in checkpoint and step of the result. Error(usage): seq_len
/// exceeds the model's positions. Error(data): no whole sample.
Analysis analyze(const TrainedModel& trained, const std::vector<DataSource>& sets, const DataConfig& data,
                 const AnalyzeOptions& options, Communicator& ranks);

}  // namespace sluice
