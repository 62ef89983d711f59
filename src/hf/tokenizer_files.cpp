#include "hf/tokenizer_files.h"

#include <nlohmann/json.hpp>

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

json settings(int64_t max_length) {
  return {{"tokenizer_class", "PreTrainedTokenizerFast"},
          {"clean_up_tokenization_spaces", false},
          {"model_max_length", max_length}};
}

}  // namespace

std::map<std::string, std::string> tokenizer_files(const Tokenizer& tokenizer, const Config& model) {
  json config = settings(model.model.max_position_embeddings.value_or(model.data.seq_len));
  config["eos_token"] = tokenizer.token_name(tokenizer.end_of_document());
  const std::optional<int64_t> begin = model.data.begin_token;
  if (begin && *begin < tokenizer.vocab_size()) {
    config["add_bos_token"] = true;
    config["bos_token"] = tokenizer.token_name(static_cast<int32_t>(*begin));
  }
  switch (model.data.tokenizer.type) {
    case TokenizerType::byte:
      config["sluice_tokenizer"] = "byte";
      return {{"tokenizer.json", byte_tokenizer(tokenizer.end_of_document()).dump(1) + "\n"},
              {"tokenizer_config.json", config.dump(2) + "\n"}};
    case TokenizerType::sentencepiece:
      // transformers makes its own settings for this file, unless a token belongs in front of each text.
      if (!begin) return {{"tokenizer.model", tokenizer.model()}};
      config.erase("tokenizer_class");
      return {{"tokenizer.model", tokenizer.model()}, {"tokenizer_config.json", config.dump(2) + "\n"}};
    case TokenizerType::bpe:
      return {{"tokenizer.json", tokenizer.model()}, {"tokenizer_config.json", config.dump(2) + "\n"}};
  }
  return {};
}

}  // namespace sluice
