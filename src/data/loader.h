#pragma once
// Samples are a pure function of (seed, global sample index). The loader has no state, works with any number
// of workers or ranks, and resumes at any sample. Blends follow a fixed low-discrepancy schedule; the samples
// of each source are shuffled again for every epoch (Feistel permutation, core/random.h).
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "config/config.h"
#include "core/tensor.h"
#include "data/text_loss.h"
#include "data/token_file.h"

namespace sluice {

/// A sample is seq_len + 1 consecutive tokens of one file of a source, at offset chunk * seq_len.
/// Neighbouring samples share one token, so that every token except the first is a target. A source has
/// floor((tokens - 1) / seq_len) samples per file; the rest of each file is not trained on. A Blend may be
/// shared between threads. With document_mask, first_key is the start of the token's document (or of the
/// sample, if that is later), and a target in the next document is -1, because it cannot be predicted from
/// this one. Without it documents form one stream, and the first token of a document is predicted from the
/// end of the previous one.
class Blend {
 public:
  /// Opens every source (globs expanded and sorted). Error(no_input): no such files. Error(data): a damaged
  /// file, or a source shorter than one sample. Error(usage): weights that are negative, all zero, or
  /// positive but below 1/131,072 of the total; document_mask if all documents have one token, so that
  /// nothing is predicted. Tokens outside [0, vocab_size) are found on reading: Error(data) with file, token
  /// index and value.
  Blend(const std::vector<DataSource>& sources, int64_t seq_len, int64_t vocab_size, bool document_mask,
        uint64_t seed);

  /// Fills rows [0, count) of tokens, targets, positions and first_key, each (count * seq_len) i32, with
  /// samples first_sample ... first_sample + count - 1 of the infinite, shuffled, blended stream. positions
  /// are 0 ... seq_len - 1; first_key is an index into these count * seq_len tokens. Allocates no memory.
  void fill(int64_t first_sample, int64_t count, int32_t* tokens, int32_t* targets, int32_t* positions,
            int32_t* first_key) const;
  /// The same in file order, for evaluation. Samples past the end of the last source have targets -1. Every
  /// token except the first of each file (with document_mask, the first of each document) is a target exactly
  /// once; the last, short sample is padded with token 0 and target -1.
  void fill_sequential(int64_t first_sample, int64_t count, int32_t* tokens, int32_t* targets,
                       int32_t* positions, int32_t* first_key) const;
  int64_t num_sequential_samples() const;

  int64_t num_tokens() const;
  /// Tokens per sources, for the start banner: name, files, tokens, normalised weight.
  struct SourceInfo {
    std::string name;
    int64_t files, tokens, samples;
    double weight;
    TextLoss loss;  // text that its tokenizer drops
  };
  std::vector<SourceInfo> sources() const;
  const std::vector<TokenFile>& files(size_t source) const;
  /// The number of epochs over each source, by name, within the first `samples` samples of the shuffled
  /// stream.
  std::vector<std::pair<std::string, double>> epochs(int64_t samples) const;
  /// Fingerprint of the tokens of all sources, in order, without names, paths and weights. Up to kHashedBytes
  /// in total, all data is read, and any change is detected; beyond that, the sizes, the indexes and 64 pages
  /// of each file are read. Computed once: later calls return the first result.
  const std::string& fingerprint() const;
  static constexpr int64_t kHashedBytes = int64_t{1} << 30;
  bool hashed_whole() const { return num_bytes() <= kHashedBytes; }
  /// The second form regardless of size, as older checkpoints store it.
  std::string sampled_fingerprint() const;
  /// Time of the latest modification of any file, in seconds since 1970.
  int64_t modified() const;
  /// The origin of a sample of the shuffled stream (for tests and debugging).
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
  std::vector<uint16_t> earlier_;   // number of earlier samples of that source in the same cycle
  mutable std::once_flag fingerprint_taken_;
  mutable std::string fingerprint_;
};

}  // namespace sluice
