#include "hf/folder_tokenizer.h"

#include "checkpoint/manifest.h"
#include "core/error.h"
#include "core/io.h"
#include "core/strict_json.h"
#include "data/bpe.h"
#include "hf/tokenizer_files.h"

namespace sluice {
namespace {

using nlohmann::json;

/// null where there is no such file.
json read_object(const std::string& path, int64_t most) {
  if (!io::exists(path)) return nullptr;
  json j = parse_strict_json(io::read_file(path, most), path);
  return j.is_object() ? j : json();
}

json settings_of(const std::string& folder) {
  return read_object(folder + "/tokenizer_config.json", int64_t{16} << 20);
}

/// The value of a key; null where the object has none.
json at(const json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && found != object.end() ? *found : json();
}

/// The token with which the template of a post-processor begins: {"SpecialToken": {"id": "<s>"}}, whose
/// number is in "special_tokens".
std::optional<int64_t> first_of_template(const json& processor) {
  if (at(processor, "type") == "Sequence") {
    for (const json& one : at(processor, "processors"))
      if (const auto token = first_of_template(one)) return token;
    return std::nullopt;
  }
  const json single = at(processor, "single");
  if (at(processor, "type") != "TemplateProcessing" || !single.is_array() || single.empty())
    return std::nullopt;
  const json name = at(at(single.front(), "SpecialToken"), "id");
  if (!name.is_string()) return std::nullopt;
  const json ids = at(at(at(processor, "special_tokens"), name.get<std::string>().c_str()), "ids");
  if (!ids.is_array() || ids.empty() || !ids.front().is_number_integer()) return std::nullopt;
  return ids.front().get<int64_t>();
}

}  // namespace

bool is_of_bytes(const std::string& folder) { return at(settings_of(folder), "sluice_tokenizer") == "byte"; }

std::optional<TokenizerConfig> folder_tokenizer(const std::string& folder, const HfModel& model) {
  if (const std::string path = folder + "/" + kTokenizerFile; io::exists(path))
    return TokenizerConfig{TokenizerType::sentencepiece, path, ""};
  if (is_of_bytes(folder)) return TokenizerConfig{};
  const std::string original = folder + "/" + kOriginalTokenizerFile;
  const std::string path = io::exists(original) ? original : folder + "/tokenizer.json";
  if (!io::exists(path)) return std::nullopt;
  TokenizerConfig tokenizer{TokenizerType::bpe, path, ""};
  if (model.end_token) try {
      tokenizer.end_of_document = bpe_end_of_document(path, *model.end_token);
    } catch (const Error&) {
      // Another kind of tokenizer: an error only where it is opened, and not where another one is given.
    }
  return tokenizer;
}

std::optional<int64_t> folder_begin_token(const std::string& folder, const HfModel& model) {
  if (model.begin_stated) return model.begin_token;
  const json settings = settings_of(folder), adds = at(settings, "add_bos_token");
  if (adds.is_boolean()) return adds.get<bool>() ? model.begin_token : std::nullopt;
  const json tokenizer = read_object(folder + "/tokenizer.json", int64_t{256} << 20);
  if (const auto token = first_of_template(at(tokenizer, "post_processor"))) return token;
  // transformers' class puts it there unless add_bos_token says otherwise.
  const json type = at(settings, "tokenizer_class");
  const bool llama = type.is_string()
                         ? type.get<std::string>().starts_with("LlamaTokenizer")
                         : model.format == HfFormat::llama && io::exists(folder + "/" + kTokenizerFile);
  return llama ? model.begin_token : std::nullopt;
}

}  // namespace sluice
