#pragma once
// Samples as a pure function of (seed, global sample index): no loader state, any number of workers or ranks,
// resume is arithmetic. Blends follow a fixed low-discrepancy schedule; each source is visited in a permuted
// order, anew for every epoch (Feistel permutation, core/random.h).
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "config/config.h"
#include "core/tensor.h"
#include "data/text_loss.h"
#include "data/token_file.h"

namespace sluice {

/// A sample: seq_len + 1 consecutive tokens of one file of a source, at offset chunk * seq_len; neighbours
/// share one token, so that every token but the first is a target. A source has sum over files of
/// floor((tokens - 1) / seq_len) samples; what is left of each file is not trained on. Sharing a Blend
/// between threads is safe.
///
/// With document_mask, first_key is the start of the token's document (or of the sample, if that is later),
/// and a target that belongs to the next document is -1: what the model cannot see the reason of is not
/// asked. Without it documents are one stream, and the first token of a document is predicted from the end of
/// the one before.
class Blend {
 public:
  /// Opens every source (globs expanded, sorted). Error(no_input): no such files. Error(data): a damaged
  /// file, or a source shorter than one sample. Error(usage): weights that are negative, all zero, or a
  /// positive one below 1/131,072 of the total; document_mask over documents of one token each, of which none
  /// would be predicted. Tokens outside [0, vocab_size) are found on reading: Error(data) with file, token
  /// index and value.
  Blend(const std::vector<DataSource>& sources, int64_t seq_len, int64_t vocab_size, bool document_mask,
        uint64_t seed);

  /// Fills rows [0, count) of tokens, targets, positions, first_key (count * seq_len) i32 with samples
  /// first_sample ... first_sample + count - 1 of the shuffled, blended, endless stream. positions are 0 ...
  /// seq_len - 1, first_key is an index into these count * seq_len tokens. Allocates no memory.
  void fill(int64_t first_sample, int64_t count, int32_t* tokens, int32_t* targets, int32_t* positions,
            int32_t* first_key) const;
  /// The same, in file order, for evaluation; samples past the end of the last source have all targets -1.
  /// Every token but the very first of each file is a target exactly once (the last, short sample is padded
  /// with token 0 and target -1); with document_mask, but the first of each document.
  void fill_sequential(int64_t first_sample, int64_t count, int32_t* tokens, int32_t* targets,
                       int32_t* positions, int32_t* first_key) const;
  int64_t num_sequential_samples() const;

  int64_t num_tokens() const;
  /// Tokens per sources, for the start banner: name, files, tokens, normalised weight.
  struct SourceInfo {
    std::string name;
    int64_t files, tokens, samples;
    double weight;
    TextLoss loss;  // what its tokenizer drops of the text
  };
  std::vector<SourceInfo> sources() const;
  const std::vector<TokenFile>& files(size_t source) const;
  /// Passes over each source, by name, that the first `samples` samples of the shuffled stream make.
  std::vector<std::pair<std::string, double>> epochs(int64_t samples) const;
  /// Of the tokens of all sources, in order; names, paths and weights are not part of it. Up to kHashedBytes
  /// in all files everything is read, and every change of the data shows; beyond that, sizes, indexes and 64
  /// pages of each file.
  std::string fingerprint() const;
  static constexpr int64_t kHashedBytes = int64_t{1} << 30;
  bool hashed_whole() const { return num_bytes() <= kHashedBytes; }
  /// The second form for any size: that of all checkpoints before there was the first.
  std::string sampled_fingerprint() const;
  /// When the newest of the files was last written to, in seconds since 1970.
  int64_t modified() const;
  /// Where a sample of the shuffled stream comes from (tests, debugging).
  struct Origin {
    int source;
    int64_t epoch, chunk;
  };
  Origin origin(int64_t sample) const;
  ~Blend();

 private:
  struct Source;
  void make_schedule();
  int64_t num_bytes() const;
  std::string hash_of_files(std::string (TokenFile::*of_file)() const) const;
  void fill_row(const TokenFile& file, int64_t begin, int64_t row, int32_t* tokens, int32_t* targets,
                int32_t* positions, int32_t* first_key) const;

  std::vector<std::unique_ptr<Source>> sources_;
  int64_t seq_len_, vocab_size_;
  bool document_mask_;
  uint64_t seed_;
  std::vector<uint16_t> schedule_;  // source of sample i mod schedule_.size()
  std::vector<uint16_t> earlier_;   // how many samples before it in the same cycle come from that source
};

}  // namespace sluice
