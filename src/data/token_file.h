#pragma once
// Reading and writing Megatron indexed datasets, PREFIX.bin + PREFIX.idx (README.md).
#include <memory>
#include <optional>
#include <string>

#include "core/guarded_file.h"

namespace sluice {

/// One memory-mapped dataset. Counts and offsets are 64-bit; the arrays of .idx are unaligned and read by
/// memcpy. Opening checks them against each other and against the file sizes in one pass over .idx
/// (Error(data) with file, field and offset; Error(no_input) if absent). Tokens may be u8, u16 or i32. A file
/// that is truncated while in use is Error(data), too. Safe to share between threads.
class TokenFile {
 public:
  /// prefix: the path without .bin/.idx (a path ending in .bin is accepted).
  explicit TokenFile(const std::string& prefix);

  const std::string& prefix() const { return prefix_; }
  int64_t num_tokens() const;
  int64_t num_sequences() const;
  int64_t num_documents() const;
  /// Number of documents with at least one token. The first token of each cannot be predicted from within the
  /// document.
  int64_t num_filled_documents() const { return filled_documents_; }
  /// First token of a sequence; begin(num_sequences()) == num_tokens().
  int64_t sequence_begin(int64_t sequence) const;
  /// Index of the first token of the document that contains token i.
  int64_t document_begin(int64_t token) const;
  /// One past the last token of that document.
  int64_t document_end(int64_t token) const;
  /// Index of the first token at or after `token` that begins a document; num_tokens() if there is none.
  int64_t next_document(int64_t token) const;
  int32_t token(int64_t i) const;
  /// Copies tokens [begin, begin + count).
  void read(int64_t begin, int64_t count, int32_t* out) const;
  /// XXH3 of both files in full, which any changed bit changes. Reads all data, on all threads.
  std::string fingerprint() const;
  /// XXH3 of the sizes, of .idx and of 64 pages of .bin: fast for any size, but changes between those pages
  /// go unnoticed.
  std::string sampled_fingerprint() const;
  /// Largest token id, by a full scan on all threads. Negative ids, which no vocabulary has, count as larger
  /// than all others.
  int32_t max_token() const;
  /// Index of the first token outside [0, vocab_size); -1 if there is none.
  int64_t find_outside(int64_t vocab_size) const;
  int64_t bytes() const { return bin_.size(); }
  const io::FileIdentity& identity() const { return bin_.identity(); }

 private:
  void check_index();
  int64_t document_bound(int64_t i) const;   // first sequence of document i
  int64_t document_of(int64_t token) const;  // by binary search

  std::string prefix_;
  io::GuardedFile bin_, idx_;
  int item_size_ = 2;
  int64_t sequences_ = 0, document_bounds_ = 0, filled_documents_ = 0, tokens_ = 0;
};

/// Users often give the text itself. If `path` (a prefix or a file) names no token file but a text, throws
/// Error(no_input) with the command that tokenizes it.
void refuse_text(const std::string& path);

/// Writes PREFIX.bin/.idx, document by document, as u16 if vocab_size < 65,500, else as i32. The files get
/// their names on finish(); without it, the data written is removed. Missing folders of the prefix are
/// created.
class TokenFileWriter {
 public:
  TokenFileWriter(const std::string& prefix, int64_t vocab_size);
  ~TokenFileWriter();
  /// Adds one document as one sequence; an empty one is skipped. Error(data): a token outside [0,
  /// vocab_size), or more tokens than a sequence may have.
  void add_document(const int32_t* tokens, int64_t count);
  /// The same for a document that arrives in parts: add each part, then end the document.
  void add_part(const int32_t* tokens, int64_t count);
  void end_document();
  /// Error(data) if nothing was added.
  void finish();
  int64_t num_tokens() const;
  int64_t num_documents() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// PREFIX.json, which describes the tokens. It is optional; token files from other tools have none.
struct TokenFileInfo {
  std::string tokenizer;  // Tokenizer::fingerprint()
  int64_t vocab_size = 0, end_of_document = 0;
  int64_t documents = 0, tokens = 0, text_bytes = 0, largest_token = 0;  // text_bytes: of the text read
  std::string tokenizer_name;  // for messages: "byte", "sentencepiece english.model"; empty where an older
                               // program wrote the file
  int64_t token_bytes = 0;     // represented by the tokens; 0: not counted (written by an older version)
  int64_t lost_bytes = 0;      // of the text read, lost in tokenization
  std::string synthetic = {};  // JSON: how documents that stand for no text were made; is written, not read
};
void write_token_file_info(const std::string& prefix, const TokenFileInfo& info);
/// Returns nothing if the file is absent; Error(data) if it is not in the format of write_token_file_info.
std::optional<TokenFileInfo> read_token_file_info(const std::string& prefix);
/// Whether a file is a PREFIX.json, as opposed to a text or a tokenizer of that name.
bool describes_tokens(const std::string& path);

}  // namespace sluice
