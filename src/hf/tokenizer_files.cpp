#include "hf/tokenizer_files.h"

#include <nlohmann/json.hpp>

#include "checkpoint/manifest.h"
#include "data/bpe_write.h"
#include "data/byte_level.h"

namespace sluice {
namespace {

using json = nlohmann::ordered_json;

/// Byte-level BPE without merges: every byte is a token, and its id.
json byte_tokenizer(int32_t end) {
  BpeText text{.special_tokens = {{"<|endoftext|>", end}},
               .normalizer = nullptr,
               .pre_tokenizer = byte_level_json(true, false),
               .decoder = byte_level_json(true, false),
               .vocabulary = json::object(),
               .merges = json::array()};
  for (int byte = 0; byte < 256; ++byte)
    text.vocabulary[byte_character(static_cast<unsigned char>(byte))] = byte;
  return bpe_json(std::move(text));
}

/// What transformers puts in front of every text by itself; nothing without a token.
json begin_template(const std::optional<std::pair<std::string, int64_t>>& begin) {
  if (!begin) return nullptr;
  const auto& [name, id] = *begin;
  const json token = {{"SpecialToken", {{"id", name}, {"type_id", 0}}}},
             text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
             second = {{"Sequence", {{"id", "B"}, {"type_id", 1}}}};
  json special = json::object();
  special[name] = {{"id", name}, {"ids", json::array({id})}, {"tokens", json::array({name})}};
  return {{"type", "TemplateProcessing"},
          {"single", json::array({token, text})},
          {"pair", json::array({token, text, second})},
          {"special_tokens", std::move(special)}};
}

/// Puts the template in the place of what a tokenizer.json has of that kind; the rest of its post-processors
/// adds no tokens, and stays.
void set_template(json& tokenizer, const json& of_begin) {
  json kept = json::array();
  const auto keep = [&](const json& one) {
    const std::string type = one.value("type", "");
    if (type != "TemplateProcessing" && type != "BertProcessing" && type != "RobertaProcessing")
      kept.push_back(one);
  };
  const json old = tokenizer.value("post_processor", json());
  if (old.is_object() && old.value("type", "") == "Sequence" && old.contains("processors"))
    for (const json& one : old["processors"]) keep(one);
  else if (old.is_object())
    keep(old);
  if (!of_begin.is_null()) kept.push_back(of_begin);
  if (kept.empty())
    tokenizer["post_processor"] = nullptr;
  else if (kept.size() == 1)
    tokenizer["post_processor"] = kept.front();
  else
    tokenizer["post_processor"] = {{"type", "Sequence"}, {"processors", std::move(kept)}};
}

json settings(int64_t max_length) {
  return {{"tokenizer_class", "PreTrainedTokenizerFast"},
          {"clean_up_tokenization_spaces", false},
          {"model_max_length", max_length}};
}

}  // namespace

std::map<std::string, std::string> tokenizer_files(const Tokenizer& tokenizer, const Config& model) {
  json config = settings(model.model.max_position_embeddings.value_or(model.data.seq_len));
  config["eos_token"] = tokenizer.token_name(tokenizer.end_of_document());
  std::optional<std::pair<std::string, int64_t>> begin;
  if (puts_begin_token(tokenizer, model)) {
    const auto id = static_cast<int32_t>(*model.data.begin_token);
    begin.emplace(tokenizer.token_name(id), id);
    config["bos_token"] = begin->first;
  }
  config["add_bos_token"] = begin.has_value();
  std::map<std::string, std::string> files;
  switch (model.data.tokenizer.type) {
    case TokenizerType::byte: {
      config["sluice_tokenizer"] = "byte";
      json bytes = byte_tokenizer(tokenizer.end_of_document());
      set_template(bytes, begin_template(begin));
      files["tokenizer.json"] = bytes.dump(1) + "\n";
      break;
    }
    case TokenizerType::sentencepiece:
      files[kTokenizerFile] = tokenizer.model();
      break;
    case TokenizerType::bpe: {
      const json original = json::parse(tokenizer.model());
      json changed = original;
      set_template(changed, begin_template(begin));
      const bool same = changed.value("post_processor", json()) == original.value("post_processor", json());
      files["tokenizer.json"] = same ? tokenizer.model() : changed.dump(1) + "\n";
      if (!same) files[kOriginalTokenizerFile] = tokenizer.model();
      break;
    }
  }
  files["tokenizer_config.json"] = config.dump(2) + "\n";
  return files;
}

bool puts_begin_token(const Tokenizer& tokenizer, const Config& model) {
  return model.data.begin_token && *model.data.begin_token < tokenizer.vocab_size();
}

}  // namespace sluice
