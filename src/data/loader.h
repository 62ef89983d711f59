#pragma once
// Samples as a pure function of (seed, global sample index): no loader state, any number of workers or ranks, resume
// is arithmetic. Blends follow a fixed low-discrepancy schedule; each source is visited in a permuted order, anew for
// every epoch (Feistel permutation, core/random.h).
#include <memory>
#include <string>
#include <vector>

#include "config/config.h"
#include "core/tensor.h"
#include "data/token_file.h"

namespace sluice {

/// A sample: seq_len + 1 consecutive tokens of one source, at offset chunk * seq_len.
class Blend {
 public:
  /// Opens every source (globs expanded). vocab_size: tokens outside it are Error(data) with file and offset.
  Blend(const std::vector<DataSource>& sources, int64_t seq_len, int64_t vocab_size, bool document_mask, uint64_t seed);

  /// Fills rows [0, count) of tokens, targets, positions, first_key (count * seq_len) i32 with samples
  /// first_sample ... first_sample + count - 1 of the shuffled, blended, endless stream.
  void fill(int64_t first_sample, int64_t count, int32_t* tokens, int32_t* targets, int32_t* positions,
            int32_t* first_key) const;
  /// The same, in file order, for evaluation; samples past the end of the last source have all targets -1. Every
  /// token but the very first of each file is a target exactly once (the last, short sample is padded).
  void fill_sequential(int64_t first_sample, int64_t count, int32_t* tokens, int32_t* targets, int32_t* positions,
                       int32_t* first_key) const;
  int64_t num_sequential_samples() const;

  int64_t num_tokens() const;
  /// Tokens per sources, for the start banner: name, files, tokens, normalised weight.
  struct SourceInfo {
    std::string name;
    int64_t files, tokens, samples;
    double weight;
  };
  std::vector<SourceInfo> sources() const;
  std::string fingerprint() const;
  /// Where a sample of the shuffled stream comes from (tests, debugging).
  struct Origin {
    int source;
    int64_t epoch, chunk;
  };
  Origin origin(int64_t sample) const;
  ~Blend();

 private:
  struct Source;
  std::vector<std::unique_ptr<Source>> sources_;
  int64_t seq_len_, vocab_size_;
  bool document_mask_;
  uint64_t seed_;
  std::vector<uint16_t> schedule_;  // source of sample i mod schedule_.size()
};

}  // namespace sluice
