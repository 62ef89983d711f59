#pragma once
// Samples are a pure function of (seed, global sample index). The loader has no state, works with any number
// of workers or ranks, and resumes at any sample. Blends follow a fixed low-discrepancy schedule; the samples
// of each source are shuffled again for every epoch (Feistel permutation, core/random.h).
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "config/config.h"
#include "core/tensor.h"
#include "data/packing.h"
#include "data/text_loss.h"
#include "data/token_file.h"

namespace sluice {

/// Without a begin token a sample is seq_len + 1 consecutive tokens of one file of a source, at offset chunk
/// * seq_len. Neighbouring samples share one token, so that every token except the first is a target. A
/// source has floor((tokens - 1) / seq_len) samples per file; the rest of each file is not trained on.
///
/// With a begin token a sample is seq_len consecutive tokens of one file from the start of a document, all of
/// them targets; its inputs are the begin token and all but the last of them. The first sample of a file
/// starts with its first document, each further one with the first document that starts at or after the end
/// of the sample before. What lies between the samples (the rest of documents that go on behind a sample) is
/// never read.
///
/// With packing documents a sample is made of pieces of whole documents (data/packing.h): targets are the
/// next tokens of the same document, the last token of a document has none (kNoTarget of core/targets.h), and
/// the rest of a sample is padding: token 0, target kPadding.
///
/// With document_mask, first_key is the start of the token's document (or of the sample, if that is later),
/// and a target in the next document is kNoTarget, because it cannot be predicted from this one. The begin
/// token belongs to the first document of its sample; other documents in it begin without one. Without the
/// mask documents form one stream, and the first token of a document is predicted from the end of the
/// previous one. With document_positions, positions count from first_key on.
///
/// A Blend may be shared between threads.
class Blend {
 public:
  /// Opens every source (globs expanded and sorted). Error(no_input): no such files. Error(data): a damaged
  /// file, or a source shorter than one sample. Error(usage): weights that are negative, all zero, or
  /// positive but below 1/131,072 of the total; document_mask if all documents have one token, so that
  /// nothing is predicted. Tokens outside [0, vocab_size) are found on reading: Error(data) with file, token
  /// index and value.
  Blend(const std::vector<DataSource>& sources, int64_t seq_len, int64_t vocab_size, bool document_mask,
        uint64_t seed, std::optional<int64_t> begin_token = std::nullopt, Packing packing = Packing::stream,
        bool document_positions = false);
  /// The same with data.seq_len, packing, document_mask, document_positions and begin_token, model.vocab_size
  /// and train.seed.
  Blend(const std::vector<DataSource>& sources, const Config& config);

  /// Fills rows [0, count) of tokens, targets, positions and first_key, each (count * seq_len) i32, with
  /// samples first_sample ... first_sample + count - 1 of the infinite, shuffled, blended stream. positions
  /// are 0 ... seq_len - 1 (or those in the document); first_key is an index into these count * seq_len
  /// tokens. Allocates no memory.
  void fill(int64_t first_sample, int64_t count, int32_t* tokens, int32_t* targets, int32_t* positions,
            int32_t* first_key) const;
  /// The same in file order, for evaluation. Samples past the end of the last source are padding. Without
  /// a begin token every token except the first of each file (with document_mask, the first of each document)
  /// is a target exactly once. With one the samples are those of training and one more where a document
  /// starts too close to its file's end. The last, short sample of a file is padded.
  void fill_sequential(int64_t first_sample, int64_t count, int32_t* tokens, int32_t* targets,
                       int32_t* positions, int32_t* first_key) const;
  int64_t num_sequential_samples() const;
  /// Whether sample i in file order has seq_len tokens, without padding.
  bool whole(int64_t sequential_sample) const;

  /// Tokens of all files.
  int64_t num_tokens() const;
  /// What the start banner says of a source.
  struct SourceInfo {
    std::string name;
    int64_t files, tokens, samples;  // samples of the shuffled stream per epoch
    double weight;                   // normalised
    TextLoss loss;                   // text that its tokenizer drops
    int64_t unread;                  // tokens that lie in no sample in file order; 0 without a begin token or
                                     // packing of documents
    std::optional<double> padding;   // share of the positions of all samples; with packing of documents
    /// Tokens that lie in no sample of the shuffled stream, neither as input nor as target: those of `unread`
    /// and what follows the last whole sample of each file.
    int64_t untrained;
    int64_t files_untrained;  // without a sample of the shuffled stream
    /// In file order: "  12% of them in no sample (data.begin_token)", "  0.3% padding (data.packing)"; empty
    /// where every token is read without padding.
    std::string describe_unread() const;
    /// The same of the shuffled stream: "  12% of them in no sample", from a tenth of a percent on, with the
    /// number of files without one; "  0.3% padding (data.packing)".
    std::string describe_untrained() const;
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
  void open(const DataSource& config);
  void make_schedule();
  int64_t num_bytes() const;
  std::string hash_of_files(std::string (TokenFile::*of_file)() const) const;
  void fill_row(const TokenFile& file, int64_t begin, int64_t row, int32_t* tokens, int32_t* targets,
                int32_t* positions, int32_t* first_key) const;
  void fill_packed_row(const TokenFile& file, std::span<const Piece> pieces, int64_t row, int32_t* tokens,
                       int32_t* targets, int32_t* positions, int32_t* first_key) const;
  /// Row from sample i of a file, in file order.
  void fill_row_of(const Source& source, size_t file, int64_t i, int64_t row, int32_t* tokens,
                   int32_t* targets, int32_t* positions, int32_t* first_key) const;
  [[noreturn]] void refuse_token(const TokenFile& file, int64_t at) const;
  /// A sample in file order: its source, file, and number within the file; nullptr past the end of the last
  /// source.
  struct Place {
    const Source* source = nullptr;
    size_t file = 0;
    int64_t sample = 0;
  };
  Place place_of(int64_t sequential_sample) const;

  std::vector<std::unique_ptr<Source>> sources_;
  int64_t seq_len_, vocab_size_;
  Packing packing_;
  bool document_mask_, document_positions_;
  uint64_t seed_;
  std::optional<int32_t> begin_token_;
  std::vector<uint16_t> schedule_;  // source of sample i mod schedule_.size()
  std::vector<uint16_t> earlier_;   // number of earlier samples of that source in the same cycle
  mutable std::once_flag fingerprint_taken_;
  mutable std::string fingerprint_;
};

}  // namespace sluice
