#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"

namespace sluice {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int64_t vocab_size() const = 0;
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  virtual std::string decode(const std::vector<int32_t>& tokens) const = 0;
  virtual int32_t end_of_document() const = 0;
  /// Bytes of text a token stands for; 0 for special tokens (bits per byte, SPEC 4.8).
  virtual int64_t token_bytes(int32_t token) const = 0;
  /// Identity of the vocabulary, kept beside token files and in checkpoints.
  virtual std::string fingerprint() const = 0;
};

/// byte: built in, 257 tokens (256 = <|endoftext|>). sentencepiece: a .model file. Error(no_input) /
/// Error(data).
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerConfig& config);

}  // namespace sluice
