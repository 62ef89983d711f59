#include "data/sentencepiece.h"

#include <sentencepiece_processor.h>
#include <xxhash.h>

#include <algorithm>
#include <array>

#include "core/io.h"
#include "core/strict_json.h"
#include "data/sentencepiece_check.h"

namespace sluice {

namespace {

/// SentencePiece (Kudo and Richardson 2018), through its library. Text is normalised by the rules of the
/// model before it is segmented, so decode(encode(text)) may differ from text, and token_bytes counts
/// normalised text, including the space that models usually prepend to a document.
class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::string& path) : path_(path) {
    if (path.empty())
      fail(ExitCode::usage, "data.tokenizer.path: a sentencepiece tokenizer needs its .model file");
    model_ = io::read_file(path);
    if (model_.find_first_not_of(" \t\r\n") == model_.find('{'))
      fail(ExitCode::data,
           "{}: is JSON, not a SentencePiece .model file; a tokenizer.json with byte-level BPE needs "
           "data.tokenizer.type: bpe",
           path);
    spec_ = check_sentencepiece_model(model_, path);
    load();
    const auto hash = XXH3_128bits(model_.data(), model_.size());
    fingerprint_ = fmt::format("{}{:016x}{:016x}", kModelFingerprint, hash.high64, hash.low64);

    end_ = processor_.eos_id();
    if (const int named = processor_.PieceToId("<|endoftext|>"); end_ < 0 && !processor_.IsUnknown(named))
      end_ = named;
    if (end_ < 0) {
      fail(ExitCode::data,
           "{}: has no end-of-sentence piece and none called <|endoftext|> to end documents with", path);
    }
    surface_.reserve(static_cast<size_t>(processor_.GetPieceSize()));
    for (int id = 0; id < processor_.GetPieceSize(); ++id) surface_.push_back(id == end_ ? "" : surface(id));
  }

  int64_t vocab_size() const override { return processor_.GetPieceSize(); }
  int32_t end_of_document() const override { return end_; }
  std::string token_name(int32_t token) const override {
    token_bytes(token);
    return processor_.IdToPiece(token);
  }
  std::string fingerprint() const override { return fingerprint_; }
  std::string name() const override { return path_; }
  const std::string& model() const override { return model_; }
  bool encodes_in_parts() const override {
    return false;
  }                                                   // normalisation and scores depend on the whole text
  int64_t document_mb() const override { return 8; }  // the encoders need up to 200 bytes per byte of text

  int64_t lost_bytes(std::string_view text, const std::vector<int32_t>& tokens) const override {
    // Compared as counts of each byte value: text that only moves is not lost.
    std::array<int64_t, 256> balance{};
    for (const char c : text) ++balance[static_cast<unsigned char>(c)];
    for (const int32_t token : tokens)
      for (const char c : surface_[static_cast<size_t>(token)]) --balance[static_cast<unsigned char>(c)];
    if (spec_.adds_space && !tokens.empty()) ++balance[' '];
    int64_t lost = 0;
    for (const int64_t count : balance) lost += std::max<int64_t>(count, 0);
    return lost;
  }

  std::string normalization() const override {
    return fmt::format("the normaliser {}{}", spec_.normalizer.empty() ? "without a name" : spec_.normalizer,
                       spec_.removes_extra_whitespace ? ", which removes extra whitespace" : "");
  }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int> ids;
    const auto status = processor_.Encode(absl::string_view(text.data(), text.size()), &ids);
    if (!status.ok())
      fail(ExitCode::data, "{}: cannot encode {} bytes: {}", path_, text.size(),
           printable(status.ToString(), 300));
    return ids;
  }

  std::string decode(const std::vector<int32_t>& tokens) const override {
    for (const int32_t token : tokens) token_bytes(token);  // the library aborts on unknown ids
    std::string text;
    const auto status = processor_.Decode(tokens, &text);
    if (!status.ok())
      fail(ExitCode::data, "{}: cannot decode {} tokens: {}", path_, tokens.size(),
           printable(status.ToString(), 300));
    return text;
  }

  std::string decode_behind(const std::vector<int32_t>& before,
                            const std::vector<int32_t>& tokens) const override {
    // Pieces depend on those in front of them only within a character, and by whether there is any text yet.
    constexpr int64_t kEnough = 8;
    std::vector<int32_t> all(before.end() - std::min(kEnough, std::ssize(before)), before.end());
    if (decode(all).empty()) all = before;
    const std::string start = decode(all);
    all.insert(all.end(), tokens.begin(), tokens.end());
    const std::string text = decode(all);
    auto same = std::mismatch(start.begin(), start.end(), text.begin(), text.end()).second - text.begin();
    // A character whose bytes the two divide is the second's; both may begin with the same byte.
    while (same > 0 && same < std::ssize(text) &&
           (static_cast<unsigned char>(text[static_cast<size_t>(same)]) & 0xc0) == 0x80)
      --same;
    return text.substr(static_cast<size_t>(same));
  }

  int64_t token_bytes(int32_t token) const override {
    if (token < 0 || token >= vocab_size()) {
      fail(ExitCode::data, "{}: token {} is outside the vocabulary of {}", path_, token, vocab_size());
    }
    return std::ssize(surface_[static_cast<size_t>(token)]);
  }
  bool is_unknown(int32_t token) const override { return token == processor_.unk_id(); }

 private:
  void load() {
    std::string problem;
    try {
      if (const auto status = processor_.LoadFromSerializedProto(model_); !status.ok())
        problem = status.ToString();
    } catch (const std::exception& error) {  // from the trie that the library builds of the pieces
      problem = error.what();
    }
    if (!problem.empty())
      fail(ExitCode::data, "{}: not a SentencePiece model: {}", path_, printable(problem, 300));
  }

  /// The text that a piece represents.
  std::string surface(int id) const {
    if (processor_.IsControl(id) || processor_.IsUnknown(id) || processor_.IsUnused(id)) return "";
    std::string text = processor_.IdToPiece(id);
    if (processor_.IsByte(id))
      return std::string(1, static_cast<char>(std::stoi(text.substr(3, 2), nullptr, 16)));  // <0x0A>
    constexpr std::string_view kSpace = "\xe2\x96\x81";  // U+2581 stands for a space
    for (size_t at = 0; (at = text.find(kSpace, at)) != std::string::npos; ++at)
      text.replace(at, kSpace.size(), " ");
    return text;
  }

  std::string path_, model_, fingerprint_;
  SentencePieceSpec spec_;
  sentencepiece::SentencePieceProcessor processor_;
  int32_t end_ = -1;
  std::vector<std::string> surface_;  // of each token
};

}  // namespace

std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(const std::string& path) {
  return std::make_unique<SentencePieceTokenizer>(path);
}

}  // namespace sluice
