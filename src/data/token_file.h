#pragma once
// Megatron indexed datasets, PREFIX.bin + PREFIX.idx (README.md): read and written.
#include <memory>
#include <optional>
#include <string>

#include "core/guarded_file.h"

namespace sluice {

/// One dataset, memory-mapped. Every count and offset is 64-bit; .idx arrays are unaligned and read by
/// memcpy; all are checked against each other and the file sizes on opening, in one pass over the .idx
/// (Error(data) names file, field and offset; Error(no_input) when absent). Reads u8, u16 and i32 tokens.
/// A file that is cut short while it is read is Error(data), too. Safe to share between threads.
class TokenFile {
 public:
  /// prefix without .bin/.idx (a path ending in .bin is accepted).
  explicit TokenFile(const std::string& prefix);

  const std::string& prefix() const { return prefix_; }
  int64_t num_tokens() const;
  int64_t num_sequences() const;
  int64_t num_documents() const;
  /// Documents that hold a token: the first token of each is not predicted from within the document.
  int64_t num_filled_documents() const { return filled_documents_; }
  /// First token of a sequence; begin(num_sequences()) == num_tokens().
  int64_t sequence_begin(int64_t sequence) const;
  /// The start (token index) of the document that holds token i.
  int64_t document_begin(int64_t token) const;
  /// One past the last token of that document.
  int64_t document_end(int64_t token) const;
  int32_t token(int64_t i) const;
  /// Copies tokens [begin, begin + count).
  void read(int64_t begin, int64_t count, int32_t* out) const;
  /// XXH3 of both files, whole: changes with every bit of the data. Reads all of it, on all threads.
  std::string fingerprint() const;
  /// The same of the sizes, of .idx and of 64 pages of .bin: quick for any size, and blind to what lies
  /// between them.
  std::string sampled_fingerprint() const;
  /// Largest token id by a full scan, on all threads. A negative one, which no vocabulary has, counts as
  /// larger than any.
  int32_t max_token() const;
  /// Index of the first token that is outside [0, vocab_size); -1 when there is none.
  int64_t find_outside(int64_t vocab_size) const;
  int64_t bytes() const { return bin_.size(); }
  const io::FileIdentity& identity() const { return bin_.identity(); }

 private:
  void check_index();
  int64_t document_bound(int64_t i) const;   // the sequence that document i begins with
  int64_t document_of(int64_t token) const;  // by binary search

  std::string prefix_;
  io::GuardedFile bin_, idx_;
  int item_size_ = 2;
  int64_t sequences_ = 0, document_bounds_ = 0, filled_documents_ = 0, tokens_ = 0;
};

/// The first mistake of many is to give the text itself. Error(no_input) with the command that makes token
/// files of it, where `path` (a prefix, or a file) leads to no token file but to a text.
void refuse_text(const std::string& path);

/// Writes PREFIX.bin/.idx: documents one by one, u16 when vocab_size < 65,500, else i32. Files appear under
/// their names only on finish(); without it, what was written is removed. Folders of the prefix are made.
class TokenFileWriter {
 public:
  TokenFileWriter(const std::string& prefix, int64_t vocab_size);
  ~TokenFileWriter();
  /// One document = one sequence; an empty one is passed over. Error(data): a token outside [0, vocab_size),
  /// or more of them than a sequence may have.
  void add_document(const int32_t* tokens, int64_t count);
  /// The same of a document that comes in parts: all of them, then its end.
  void add_part(const int32_t* tokens, int64_t count);
  void end_document();
  /// Error(data) when nothing was added.
  void finish();
  int64_t num_tokens() const;
  int64_t num_documents() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// PREFIX.json, beside the two files: what the tokens are. Optional; other tools' token files have none.
struct TokenFileInfo {
  std::string tokenizer;  // Tokenizer::fingerprint()
  int64_t vocab_size = 0, end_of_document = 0;
  int64_t documents = 0, tokens = 0, text_bytes = 0, largest_token = 0;  // text_bytes: of the text read
  std::string tokenizer_name;  // for messages: "byte", "sentencepiece english.model"; empty where an older
                               // program wrote the file
  int64_t token_bytes = 0;     // that the tokens stand for; 0: not counted (written by an earlier version)
  int64_t lost_bytes = 0;      // of the text read, that the tokens do not give back
};
void write_token_file_info(const std::string& prefix, const TokenFileInfo& info);
/// Nothing when the file is absent; Error(data) when it is not what write_token_file_info writes.
std::optional<TokenFileInfo> read_token_file_info(const std::string& prefix);

}  // namespace sluice
