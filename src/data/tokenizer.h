#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"
#include "core/fingerprint.h"

namespace sluice {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int64_t vocab_size() const = 0;
  /// Special tokens that are written out in the text stay text.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  /// They become those tokens, where the tokenizer can: for prompts.
  virtual std::vector<int32_t> encode_with_special(std::string_view text) const { return encode(text); }
  virtual std::string decode(const std::vector<int32_t>& tokens) const = 0;
  /// What `tokens` add to the text of `before`. It is their own text, except where a tokenizer drops the
  /// space in front of a text's first word, which in the middle of a text it does not.
  virtual std::string decode_behind([[maybe_unused]] const std::vector<int32_t>& before,
                                    const std::vector<int32_t>& tokens) const {
    return decode(tokens);
  }
  virtual int32_t end_of_document() const = 0;
  /// Whether a model that says this token has nothing more to say: the end of a document, or a token beyond
  /// the vocabulary, of which a model may have more than its tokenizer, and which stands for no text.
  bool ends_text(int32_t token) const { return token == end_of_document() || token >= vocab_size(); }
  /// How the tokenizer's file writes a token, special or not: "<|endoftext|>".
  virtual std::string token_name(int32_t token) const = 0;
  /// Number of bytes of text that a token represents; 0 for special tokens (bits per byte: README.md).
  virtual int64_t token_bytes(int32_t token) const = 0;
  /// Whether it stands for text that has no token of its own, whose bytes it does not tell.
  virtual bool is_unknown([[maybe_unused]] int32_t token) const { return false; }
  /// Identifies the vocabulary; stored beside token files and in checkpoints.
  virtual std::string fingerprint() const = 0;
  /// For messages: "byte", or the path of the model file.
  virtual std::string name() const = 0;
  /// The content of the model file, from which the tokenizer can be recreated; empty for a built-in one.
  virtual const std::string& model() const = 0;
  /// encode(a + b) is encode(a) followed by encode(b), so that a long text can be encoded in parts.
  virtual bool encodes_in_parts() const = 0;
  /// Largest document in MiB that is encoded as a whole unless more is asked for, by the memory it takes.
  virtual int64_t document_mb() const { return 64; }
  /// Number of bytes of a text that its tokens lose: removed or replaced by the normaliser, or unknown
  /// characters.
  virtual int64_t lost_bytes(std::string_view text, const std::vector<int32_t>& tokens) const = 0;
  /// How text is changed before it is split into tokens: "the normaliser nmt_nfkc, which removes extra
  /// whitespace".
  virtual std::string normalization() const = 0;
};

/// byte: built in, 257 tokens (256 = <|endoftext|>). sentencepiece: a .model file. bpe: a tokenizer.json.
/// Error(no_input) / Error(data).
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerConfig& config);

/// The configuration that `--tokenizer byte|PATH` selects: bpe for a name that ends in .json.
TokenizerConfig tokenizer_config(const std::string& byte_or_path);

}  // namespace sluice
