#include "data/bpe.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "core/error.h"
#include "core/io.h"
#include "core/strict_json.h"
#include "core/utf8.h"
#include "data/bpe_file.h"
#include "data/byte_level.h"

namespace sluice {
namespace {

constexpr std::array<const char*, 4> kEndNames = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"};

/// The token that is written so; -1: none.
int32_t id_of(const BpeFile& file, const std::string& content) {
  for (const AddedToken& token : file.added)
    if (token.content == content) return token.id;
  const auto found = file.vocabulary.find(content);
  return found == file.vocabulary.end() ? -1 : found->second;
}

/// The first of the usual names that the file has; nullptr: none.
const char* usual_end(const BpeFile& file) {
  const auto has = [&](const char* name) { return id_of(file, name) >= 0; };
  const auto found = std::find_if(kEndNames.begin(), kEndNames.end(), has);
  return found == kEndNames.end() ? nullptr : *found;
}

/// Memory of one thread that encodes.
struct Workplace {
  Pattern::Memory pattern;
  BpeMerges::Memory merges;
  int64_t added_spaces = 0;  // in front of the pieces of the text
};

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(const std::string& path, const std::string& end_of_document) : path_(path) {
    if (path.empty()) fail(ExitCode::usage, "data.tokenizer.path: a bpe tokenizer needs its tokenizer.json");
    text_ = io::read_file(path);
    BpeFile file = read_bpe_file(text_, path);
    const auto hash = XXH3_128bits(text_.data(), text_.size());
    fingerprint_ = fmt::format("{}{:016x}{:016x}", kModelFingerprint, hash.high64, hash.low64);
    normalizers_ = file.normalizers;
    find_end(file, end_of_document);
    take_tokens(file);
    take_merges(file);
    pretokenizer_.emplace(std::move(*file.pretokenizer));
    loses_nothing_ = loses_nothing_ && !pretokenizer_->drops_text();
  }

  int64_t vocab_size() const override { return std::ssize(surface_); }
  int32_t end_of_document() const override { return end_; }
  std::string token_name(int32_t token) const override {
    token_bytes(token);
    const auto written = written_.find(token);
    return written == written_.end() ? byte_characters(surface_[static_cast<size_t>(token)])
                                     : written->second;
  }
  std::string fingerprint() const override { return fingerprint_; }
  std::string name() const override { return path_; }
  const std::string& model() const override { return text_; }
  bool encodes_in_parts() const override { return false; }  // pieces reach across any cut

  std::string normalization() const override {
    std::string text = normalizers_.empty() ? "no normaliser" : "a normaliser to a Unicode form";
    if (pretokenizer_->drops_text()) return text + ", and a pre-tokenizer that removes text";
    if (normalizers_.empty() && !loses_nothing_)
      text += ", but tokens that stand for other bytes than they are made of, or bytes without one";
    return text;
  }

  std::vector<int32_t> encode(std::string_view text) const override { return encode(text, false); }
  std::vector<int32_t> encode_with_special(std::string_view text) const override {
    return encode(text, true);
  }

  std::string decode(const std::vector<int32_t>& tokens) const override {
    std::string text;
    for (const int32_t token : tokens) {
      token_bytes(token);
      text += surface_[static_cast<size_t>(token)];
    }
    return text;
  }

  int64_t token_bytes(int32_t token) const override {
    if (token < 0 || token >= vocab_size())
      fail(ExitCode::data, "{}: token {} is outside the vocabulary of {}", path_, token, vocab_size());
    return std::ssize(surface_[static_cast<size_t>(token)]);
  }
  bool is_unknown(int32_t token) const override { return token == unknown_; }

  int64_t lost_bytes(std::string_view text, const std::vector<int32_t>& tokens) const override {
    if (loses_nothing_) return 0;
    std::array<int64_t, 256> balance{};
    if (pretokenizer_->adds_space()) balance[' '] = added_spaces(text);
    for (const char c : text) ++balance[static_cast<unsigned char>(c)];
    for (const int32_t token : tokens)
      for (const char c : surface_[static_cast<size_t>(token)]) --balance[static_cast<unsigned char>(c)];
    int64_t lost = 0;
    for (const int64_t count : balance) lost += std::max<int64_t>(count, 0);
    return lost;
  }

 private:
  void take_tokens(const BpeFile& file) {
    surface_.resize(static_cast<size_t>(file.vocab_size));
    const auto set = [&](const std::string& content, int32_t id) {
      surface_[static_cast<size_t>(id)] = bytes_of_characters(content).value_or(content);
    };
    for (const auto& [content, id] : file.vocabulary) set(content, id);
    loses_nothing_ = normalizers_.empty();
    for (AddedToken token : file.added) {
      set(token.normalized ? normal(token.content) : token.content, token.id);
      written_[token.id] = token.content;
      // Whatever the file says, a document does not end where its text holds the name of the token.
      token.special = token.special || token.id == end_;
      if (token.special) {
        surface_[static_cast<size_t>(token.id)].clear();
      } else if (surface_[static_cast<size_t>(token.id)] != token.content || token.lstrip || token.rstrip) {
        loses_nothing_ = false;
      }
      if (token.normalized) {
        normalized_tokens_.add(token, normal(token.content));
      } else {
        raw_tokens_.add(token, token.content);
      }
    }
    surface_[static_cast<size_t>(end_)].clear();
  }

  void find_end(const BpeFile& file, const std::string& chosen) {
    const char* const usual = usual_end(file);
    if (chosen.empty() && !usual)
      fail(ExitCode::data,
           "{}: has none of <|endoftext|>, <|end_of_text|>, </s> and <eos> to end documents with; name its "
           "token by data.tokenizer.end_of_document",
           path_);
    const std::string name = chosen.empty() ? usual : chosen;
    end_ = id_of(file, name);
    if (end_ < 0)
      fail(ExitCode::usage, "data.tokenizer.end_of_document: {} has no token {}", path_, printable(chosen));
    written_[end_] = name;
  }

  /// A token that text becomes must not be the one that ends documents.
  void refuse_end(int32_t id, const char* because) const {
    if (id != end_) return;
    fail(ExitCode::data,
         "{}: documents cannot end with {}, {}; name another token by data.tokenizer.end_of_document "
         "(tokenize --end-of-document)",
         path_, printable(written_.at(end_)), because);
  }

  const std::string& surface(int32_t id) const { return surface_[static_cast<size_t>(id)]; }

  /// Nothing is lost where each token stands for the bytes that it is made of.
  void take_merges(BpeFile& file) {
    std::array<int32_t, 256> byte_ids{};
    for (unsigned byte = 0; byte < 256; ++byte) {
      const auto found = file.vocabulary.find(byte_character(static_cast<unsigned char>(byte)));
      const int32_t id = byte_ids[byte] = found == file.vocabulary.end() ? -1 : found->second;
      refuse_end(id, "which stands for a byte of text");
      if (id < 0) refuse_end(file.unknown.id, "which bytes without a token become");
      loses_nothing_ = loses_nothing_ && id >= 0 && surface(id) == std::string(1, static_cast<char>(byte));
    }
    for (const BpeMerge& merge : file.merges) {
      refuse_end(merge.merged, "which text is merged to");
      loses_nothing_ = loses_nothing_ && surface(merge.merged) == surface(merge.left) + surface(merge.right);
    }
    unknown_ = file.unknown.id;
    merges_.emplace(byte_ids, file.merges, file.unknown);
    if (!file.ignore_merges) return;
    std::unordered_map<std::string, int32_t> whole;
    for (const auto& [content, id] : file.vocabulary) {
      const auto bytes = bytes_of_characters(content);
      if (!bytes || id == end_) continue;
      whole.emplace(*bytes, id);
      loses_nothing_ = loses_nothing_ && surface(id) == *bytes;
    }
    merges_->set_whole(std::move(whole));
  }

  std::string normal(std::string_view text) const {
    std::string out(text);
    for (const UnicodeForm form : normalizers_) out = to_unicode_form(out, form);
    return out;
  }

  std::vector<int32_t> encode(std::string_view text, bool with_special) const {
    const Borrowed workplace(*this);
    return encode(text, with_special, *workplace);
  }

  int64_t added_spaces(std::string_view text) const {
    const Borrowed workplace(*this);
    workplace->added_spaces = 0;
    encode(text, false, *workplace);
    return workplace->added_spaces;
  }

  std::vector<int32_t> encode(std::string_view text, bool with_special, Workplace& workplace) const {
    std::vector<int32_t> out;
    out.reserve(text.size() / 3 + 1);
    while (!text.empty()) {
      const size_t valid = std::min(find_invalid_utf8(text), text.size());
      if (valid > 0) encode_valid(text.substr(0, valid), with_special, workplace, out);
      text.remove_prefix(valid);
      // Bytes that are not UTF-8 are a piece of their own, so that nothing is lost.
      size_t invalid = text.empty() ? 0 : 1;
      while (invalid < text.size() && find_invalid_utf8(text.substr(invalid, 4)) == 0) ++invalid;
      merges_->encode(text.substr(0, invalid), workplace.merges, out);
      text.remove_prefix(invalid);
    }
    return out;
  }

  void encode_valid(std::string_view text, bool with_special, Workplace& workplace,
                    std::vector<int32_t>& out) const {
    const auto on_token = [&](int32_t id) { out.push_back(id); };
    const auto on_piece = [&](std::string_view piece) { merges_->encode(piece, workplace.merges, out); };
    const Pretokenizer::OnPiece pass = std::ref(on_piece);
    const auto on_normal = [&](std::string_view part) {
      workplace.added_spaces += pretokenizer_->cut(part, workplace.pattern, pass);
    };
    const auto on_raw = [&](std::string_view part) {
      if (normalizers_.empty()) return normalized_tokens_.split(part, with_special, on_normal, on_token);
      const bool unchanged =
          normalizers_.size() == 1 && normalizers_[0] == UnicodeForm::nfc && plainly_nfc(part);
      if (unchanged) return normalized_tokens_.split(part, with_special, on_normal, on_token);
      normalized_tokens_.split(normal(part), with_special, on_normal, on_token);
    };
    raw_tokens_.split(text, with_special, on_raw, on_token);
  }

  /// A workplace that no other thread has meanwhile.
  class Borrowed {
   public:
    explicit Borrowed(const BpeTokenizer& owner) : owner_(owner) {
      const std::lock_guard lock(owner_.mutex_);
      if (owner_.free_.empty()) {
        mine_ = std::make_unique<Workplace>();
      } else {
        mine_ = std::move(owner_.free_.back());
        owner_.free_.pop_back();
      }
    }
    ~Borrowed() {
      const std::lock_guard lock(owner_.mutex_);
      owner_.free_.push_back(std::move(mine_));
    }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    Workplace& operator*() const { return *mine_; }
    Workplace* operator->() const { return mine_.get(); }

   private:
    const BpeTokenizer& owner_;
    std::unique_ptr<Workplace> mine_;
  };

  std::string path_, text_, fingerprint_;
  std::vector<UnicodeForm> normalizers_;
  AddedTokens raw_tokens_, normalized_tokens_;
  std::optional<Pretokenizer> pretokenizer_;
  std::optional<BpeMerges> merges_;
  std::vector<std::string> surface_;        // the bytes that each token stands for; none for special tokens
  std::map<int32_t, std::string> written_;  // the names of added tokens, and of the one that ends documents
  int32_t end_ = -1, unknown_ = -1;
  bool loses_nothing_ = false;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Workplace>> free_;
};

}  // namespace

std::string bpe_end_of_document(const std::string& path, int64_t token) {
  const BpeFile file = read_bpe_file(io::read_file(path), path);
  if (const char* const usual = usual_end(file); usual && id_of(file, usual) == token) return "";
  for (const AddedToken& added : file.added)
    if (added.id == token) return added.content;
  return "";
}

std::unique_ptr<Tokenizer> make_bpe_tokenizer(const std::string& path, const std::string& end_of_document) {
  return std::make_unique<BpeTokenizer>(path, end_of_document);
}

}  // namespace sluice
