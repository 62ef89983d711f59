#pragma once
// Megatron indexed datasets, PREFIX.bin + PREFIX.idx (FORMATS 1): read and written.
#include <memory>
#include <string>

#include "core/io.h"

namespace sluice {

/// One dataset, memory-mapped. Every count and offset is 64-bit; .idx arrays are unaligned and read by memcpy; all are
/// checked against the file sizes on opening (Error(data) names file, field and offset; Error(no_input) when absent).
class TokenFile {
 public:
  /// prefix without .bin/.idx (a path ending in .bin is accepted).
  explicit TokenFile(const std::string& prefix);

  const std::string& prefix() const { return prefix_; }
  int64_t num_tokens() const;
  int64_t num_sequences() const;
  int64_t num_documents() const;
  /// First token of a sequence; begin(num_sequences()) == num_tokens().
  int64_t sequence_begin(int64_t sequence) const;
  /// The start (token index) of the document that holds token i.
  int64_t document_begin(int64_t token) const;
  int32_t token(int64_t i) const;
  /// Copies tokens [begin, begin + count).
  void read(int64_t begin, int64_t count, int32_t* out) const;
  /// Sizes + XXH3 of .idx and of sampled pages of .bin: changes when the data does (RELIABILITY 10).
  std::string fingerprint() const;
  /// Largest token id, by a full scan (tokenize and `sluice doctor`-like checks).
  int32_t max_token() const;

 private:
  std::string prefix_;
  io::MappedFile bin_, idx_;
  int item_size_ = 2;
  int64_t sequences_ = 0, document_bounds_ = 0, tokens_ = 0;
};

/// Writes PREFIX.bin/.idx: documents one by one, u16 when vocab_size < 65,500, else i32. Files appear under their names
/// only on finish().
class TokenFileWriter {
 public:
  TokenFileWriter(const std::string& prefix, int64_t vocab_size);
  ~TokenFileWriter();
  void add_document(const int32_t* tokens, int64_t count);
  void finish();
  int64_t num_tokens() const;
  int64_t num_documents() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
