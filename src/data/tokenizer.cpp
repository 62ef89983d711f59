#include "data/tokenizer.h"

#include "core/error.h"
#include "data/bpe.h"
#include "data/byte_level.h"
#include "data/sentencepiece.h"

namespace sluice {

namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  static constexpr int32_t kEndOfDocument = 256;

  int64_t vocab_size() const override { return 257; }
  int32_t end_of_document() const override { return kEndOfDocument; }
  std::string token_name(int32_t token) const override {
    return token_bytes(token) == 1 ? byte_character(static_cast<unsigned char>(token)) : "<|endoftext|>";
  }
  std::string fingerprint() const override { return "byte:257"; }
  std::string name() const override { return "byte"; }
  const std::string& model() const override { return model_; }
  bool encodes_in_parts() const override { return true; }
  int64_t lost_bytes(std::string_view, const std::vector<int32_t>&) const override { return 0; }
  std::string normalization() const override { return "no normaliser"; }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> tokens(text.size());
    for (size_t i = 0; i < text.size(); ++i) tokens[i] = static_cast<unsigned char>(text[i]);
    return tokens;
  }

  std::string decode(const std::vector<int32_t>& tokens) const override {
    std::string text;
    text.reserve(tokens.size());
    for (const int32_t token : tokens) {
      if (token_bytes(token) == 1) text.push_back(static_cast<char>(token));
    }
    return text;
  }

  int64_t token_bytes(int32_t token) const override {
    if (token < 0 || token > kEndOfDocument) {
      fail(ExitCode::data, "byte tokenizer: token {} is outside the vocabulary of 257", token);
    }
    return token < kEndOfDocument ? 1 : 0;
  }

 private:
  std::string model_;  // always empty
};

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerConfig& config) {
  switch (config.type) {
    case TokenizerType::byte:
      return std::make_unique<ByteTokenizer>();
    case TokenizerType::sentencepiece:
      return make_sentencepiece_tokenizer(config.path);
    case TokenizerType::bpe:
      return make_bpe_tokenizer(config.path, config.end_of_document);
  }
  fail(ExitCode::internal, "make_tokenizer: unknown type");
}

TokenizerConfig tokenizer_config(const std::string& byte_or_path) {
  if (byte_or_path == "byte") return {};
  const bool bpe = byte_or_path.ends_with(".json");
  return {bpe ? TokenizerType::bpe : TokenizerType::sentencepiece, byte_or_path, ""};
}

}  // namespace sluice
