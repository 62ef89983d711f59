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

std::map<std::string, std::string> tokenizer_files(const Tokenizer& tokenizer, TokenizerType type,
                                                   int64_t max_length) {
  json config = settings(max_length);
  switch (type) {
    case TokenizerType::byte:
      config["eos_token"] = "<|endoftext|>";
      config["sluice_tokenizer"] = "byte";
      return {{"tokenizer.json", byte_tokenizer(tokenizer.end_of_document()).dump(1) + "\n"},
              {"tokenizer_config.json", config.dump(2) + "\n"}};
    case TokenizerType::sentencepiece:
      return {{"tokenizer.model", tokenizer.model()}};
    case TokenizerType::bpe:
      config["eos_token"] = tokenizer.decode({tokenizer.end_of_document()});
      return {{"tokenizer.json", tokenizer.model()}, {"tokenizer_config.json", config.dump(2) + "\n"}};
  }
  return {};
}

}  // namespace sluice
