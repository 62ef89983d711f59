#include "data/bpe_file.h"

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/strict_json.h"
#include "data/byte_level.h"

namespace sluice {
namespace {

using nlohmann::json;

/// Reads the members of a tokenizer.json; errors name the file and the key.
class Reader {
 public:
  Reader(std::string_view text, const std::string& path) : path_(path) {
    const size_t first = text.find_first_not_of(" \t\r\n");
    if (first == std::string_view::npos || text[first] != '{')
      fail(ExitCode::data,
           "{}: not a tokenizer.json: it does not begin with {{; a SentencePiece .model needs "
           "data.tokenizer.type: sentencepiece",
           path);
    root_ = parse_strict_json(text, path);
  }

  BpeFile read() {
    check_model_type();
    read_normalizer(member(root_, "normalizer"), "normalizer", 0);
    file_.pretokenizer.emplace(member(root_, "pre_tokenizer"), path_ + ": pre_tokenizer");
    check_decoder();
    read_vocabulary();
    read_added();
    read_model_flags();
    read_merges();
    return std::move(file_);
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(const std::string& key, fmt::format_string<Args...> format, Args&&... args) const {
    fail(ExitCode::data, "{}: {}: {}", path_, key, fmt::format(format, std::forward<Args>(args)...));
  }

  /// null where it is absent.
  static const json& member(const json& object, const char* key) {
    static const json none;
    const auto found = object.find(key);
    return found == object.end() ? none : *found;
  }

  bool flag(const json& object, const char* key, const std::string& at) const {
    const json& value = member(object, key);
    if (value.is_null()) return false;
    if (!value.is_boolean()) refuse(at + "." + key, "must be true or false");
    return value.get<bool>();
  }

  int32_t id_of(const json& value, const std::string& key) const {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(kLargestTokenId))
      refuse(key, "an id must be a whole number from 0 to {}", kLargestTokenId);
    return value.get<int32_t>();
  }

  void check_model_type() const {
    const json& model = member(root_, "model");
    if (!model.is_object()) refuse("model", "there is none; is this a tokenizer.json of Hugging Face?");
    const json& type = member(model, "type");
    // Older files do not say it, and have merges.
    if (type.is_null() && model.contains("merges")) return;
    if (!type.is_string() || type.get<std::string>() != "BPE")
      refuse("model.type", "{} is not supported; byte-level BPE is{}",
             type.is_string() ? printable(type.get<std::string>()) : "a value that is no text",
             type == "Unigram" ? ", and SentencePiece's own .model file (data.tokenizer.type: sentencepiece)"
                               : "");
  }

  void read_normalizer(const json& normalizer, const std::string& key, int depth) {
    if (normalizer.is_null()) return;
    const json& type = normalizer.is_object() ? member(normalizer, "type") : normalizer;
    if (!normalizer.is_object() || !type.is_string()) refuse(key, "must be an object with a type");
    const std::string name = type.get<std::string>();
    if (name == "Sequence") {
      const json& list = member(normalizer, "normalizers");
      if (!list.is_array() || list.size() > 16 || depth > 4)
        refuse(key + ".normalizers", "must be a list of at most 16");
      for (size_t i = 0; i < list.size(); ++i)
        read_normalizer(list[i], fmt::format("{}.normalizers[{}]", key, i), depth + 1);
      return;
    }
    const UnicodeForm form = name == "NFC"    ? UnicodeForm::nfc
                             : name == "NFD"  ? UnicodeForm::nfd
                             : name == "NFKC" ? UnicodeForm::nfkc
                             : name == "NFKD" ? UnicodeForm::nfkd
                                              : UnicodeForm::none;
    if (form == UnicodeForm::none)
      refuse(key, "{} is not supported; NFC, NFD, NFKC and NFKD are", printable(name));
    file_.normalizers.push_back(form);
  }

  void check_decoder() const {
    const json& decoder = member(root_, "decoder");
    if (decoder.is_null()) return;
    const json& type = decoder.is_object() ? member(decoder, "type") : decoder;
    if (type != "ByteLevel")
      refuse("decoder", "{} is not supported; ByteLevel is",
             type.is_string() ? printable(type.get<std::string>()) : "a value that has no type");
  }

  void read_vocabulary() {
    const json& vocabulary = member(root_["model"], "vocab");
    if (!vocabulary.is_object() || vocabulary.empty()) refuse("model.vocab", "must be an object of ids");
    std::vector<bool> taken;
    for (const auto& [token, value] : vocabulary.items()) {
      if (token.size() > kLongestToken)
        refuse("model.vocab", "a token has {} bytes; at most {} are supported", token.size(), kLongestToken);
      const int32_t id = id_of(value, fmt::format("model.vocab[\"{}\"]", printable(token)));
      taken.resize(std::max(taken.size(), static_cast<size_t>(id) + 1));
      if (taken[static_cast<size_t>(id)])
        refuse(fmt::format("model.vocab[\"{}\"]", printable(token)), "another token has the id {}, too", id);
      taken[static_cast<size_t>(id)] = true;
      file_.vocabulary.emplace(token, id);
    }
    file_.vocab_size = std::ssize(taken);
  }

  void read_added() {
    const json& list = member(root_, "added_tokens");
    if (list.is_null()) return;
    if (!list.is_array()) refuse("added_tokens", "must be a list");
    std::unordered_map<int32_t, std::string> by_id;
    for (const auto& [content, id] : file_.vocabulary) by_id.emplace(id, content);
    std::unordered_map<std::string, int32_t> known;
    for (size_t i = 0; i < list.size(); ++i) {
      const json& given = list[i];
      const std::string key = fmt::format("added_tokens[{}]", i);
      if (!given.is_object()) refuse(key, "must be an object");
      AddedToken token;
      const json& content = member(given, "content");
      if (!content.is_string() || content.get_ref<const std::string&>().empty())
        refuse(key + ".content", "must be a text that is not empty");
      token.content = content.get<std::string>();
      if (token.content.size() > kLongestAddedToken)
        refuse(key + ".content", "has {} bytes; at most {} are supported", token.content.size(),
               kLongestAddedToken);
      token.id = id_of(member(given, "id"), key + ".id");
      const auto in_vocabulary = file_.vocabulary.find(token.content);
      if (in_vocabulary != file_.vocabulary.end() && in_vocabulary->second != token.id)
        refuse(key + ".id", "is {}, but model.vocab gives {} to {}", token.id, in_vocabulary->second,
               printable(token.content));
      const auto [same, is_new] = by_id.emplace(token.id, token.content);
      if (!is_new && same->second != token.content)
        refuse(key + ".id", "{} is the id of {}, too", token.id, printable(same->second));
      if (!known.emplace(token.content, token.id).second)
        refuse(key + ".content", "{} is added twice", printable(token.content));
      token.special = flag(given, "special", key);
      token.normalized = flag(given, "normalized", key);
      token.single_word = flag(given, "single_word", key);
      token.lstrip = flag(given, "lstrip", key);
      token.rstrip = flag(given, "rstrip", key);
      file_.vocab_size = std::max<int64_t>(file_.vocab_size, token.id + 1);
      file_.added.push_back(std::move(token));
    }
  }

  void read_model_flags() {
    const json& model = root_["model"];
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const json& value = member(model, key);
      if (!value.is_null() && value != "")
        refuse(std::string("model.") + key, "is not part of byte-level BPE, and not supported");
    }
    const json& dropout = member(model, "dropout");
    if (!dropout.is_null() && !(dropout.is_number() && dropout.get<double>() == 0))
      refuse("model.dropout", "merges that are left out at random are not supported; it must be null");
    file_.ignore_merges = flag(model, "ignore_merges", "model");
    file_.unknown.fuse = flag(model, "fuse_unk", "model");
    const json& unknown = member(model, "unk_token");
    if (unknown.is_string() && !unknown.get_ref<const std::string&>().empty()) {
      const auto found = file_.vocabulary.find(unknown.get<std::string>());
      if (found == file_.vocabulary.end())
        refuse("model.unk_token", "{} is not in model.vocab", printable(unknown.get<std::string>()));
      file_.unknown.id = found->second;
    } else if (!unknown.is_null() && !unknown.is_string()) {
      refuse("model.unk_token", "must be a text or null");
    }
    if (!flag(model, "byte_fallback", "model")) return;
    for (unsigned byte = 0; byte < 256; ++byte)
      if (!file_.vocabulary.contains(byte_character(static_cast<unsigned char>(byte))))
        refuse("model.byte_fallback",
               "is not supported where bytes are missing in model.vocab, here 0x{:02x}", byte);
  }

  /// "a b", or ["a", "b"].
  std::pair<std::string, std::string> parts_of(const json& merge, const std::string& key) const {
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
      return {merge[0].get<std::string>(), merge[1].get<std::string>()};
    if (merge.is_string()) {
      const std::string& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos)
        return {text.substr(0, space), text.substr(space + 1)};
    }
    refuse(key, "must be two tokens, as \"a b\" or [\"a\", \"b\"]");
  }

  void read_merges() {
    const json& merges = member(root_["model"], "merges");
    if (!merges.is_array()) refuse("model.merges", "must be a list");
    if (merges.size() > size_t{1} << 26) refuse("model.merges", "{} are too many", merges.size());
    file_.merges.reserve(merges.size());
    const auto id_of_token = [&](const std::string& token, const std::string& key) {
      const auto found = file_.vocabulary.find(token);
      if (found == file_.vocabulary.end()) refuse(key, "{} is not in model.vocab", printable(token));
      return found->second;
    };
    for (size_t i = 0; i < merges.size(); ++i) {
      const std::string key = fmt::format("model.merges[{}]", i);
      const auto [left, right] = parts_of(merges[i], key);
      file_.merges.push_back({id_of_token(left, key), id_of_token(right, key), static_cast<int32_t>(i),
                              id_of_token(left + right, key)});
    }
  }

  const std::string& path_;
  json root_;
  BpeFile file_;
};

}  // namespace

BpeFile read_bpe_file(std::string_view text, const std::string& path) { return Reader(text, path).read(); }

}  // namespace sluice
