#include "data/sentencepiece.h"

#include <sentencepiece_processor.h>
#include <xxhash.h>

#include "core/io.h"

namespace sluice {

namespace {

/// SentencePiece (Kudo and Richardson 2018), through its library. Text is normalised by the model's own rules
/// before it is cut, so decode(encode(text)) may differ from text, and token_bytes counts normalised text,
/// including the space that models usually put before a document.
class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::string& path) : path_(path) {
    if (path.empty())
      fail(ExitCode::usage, "data.tokenizer.path: a sentencepiece tokenizer needs its .model file");
    const std::string model = io::read_file(path);
    if (const auto status = processor_.LoadFromSerializedProto(model); !status.ok()) {
      fail(ExitCode::data, "{}: not a SentencePiece model: {}", path, status.ToString());
    }
    const auto hash = XXH3_128bits(model.data(), model.size());
    fingerprint_ = fmt::format("xxh3:{:016x}{:016x}", hash.high64, hash.low64);

    end_ = processor_.eos_id();
    if (const int named = processor_.PieceToId("<|endoftext|>"); end_ < 0 && !processor_.IsUnknown(named))
      end_ = named;
    if (end_ < 0) {
      fail(ExitCode::data,
           "{}: has no end-of-sentence piece and none called <|endoftext|> to end documents with", path);
    }
    bytes_.reserve(static_cast<size_t>(processor_.GetPieceSize()));
    for (int id = 0; id < processor_.GetPieceSize(); ++id) bytes_.push_back(id == end_ ? 0 : count_bytes(id));
  }

  int64_t vocab_size() const override { return processor_.GetPieceSize(); }
  int32_t end_of_document() const override { return end_; }
  std::string fingerprint() const override { return fingerprint_; }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int> ids;
    const auto status = processor_.Encode(absl::string_view(text.data(), text.size()), &ids);
    if (!status.ok())
      fail(ExitCode::data, "{}: cannot encode {} bytes: {}", path_, text.size(), status.ToString());
    return ids;
  }

  std::string decode(const std::vector<int32_t>& tokens) const override {
    for (const int32_t token : tokens) token_bytes(token);  // the library aborts on foreign ids
    std::string text;
    const auto status = processor_.Decode(tokens, &text);
    if (!status.ok())
      fail(ExitCode::data, "{}: cannot decode {} tokens: {}", path_, tokens.size(), status.ToString());
    return text;
  }

  int64_t token_bytes(int32_t token) const override {
    if (token < 0 || token >= vocab_size()) {
      fail(ExitCode::data, "{}: token {} is outside the vocabulary of {}", path_, token, vocab_size());
    }
    return bytes_[static_cast<size_t>(token)];
  }

 private:
  int64_t count_bytes(int id) const {
    if (processor_.IsControl(id) || processor_.IsUnknown(id) || processor_.IsUnused(id)) return 0;
    if (processor_.IsByte(id)) return 1;
    constexpr std::string_view kSpace = "\xe2\x96\x81";  // U+2581 stands for a space
    const std::string& piece = processor_.IdToPiece(id);
    auto bytes = static_cast<int64_t>(piece.size());
    for (size_t at = piece.find(kSpace); at != std::string::npos;
         at = piece.find(kSpace, at + kSpace.size())) {
      bytes -= static_cast<int64_t>(kSpace.size()) - 1;
    }
    return bytes;
  }

  std::string path_, fingerprint_;
  sentencepiece::SentencePieceProcessor processor_;
  int32_t end_ = -1;
  std::vector<int64_t> bytes_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(const std::string& path) {
  return std::make_unique<SentencePieceTokenizer>(path);
}

}  // namespace sluice
