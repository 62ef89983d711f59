#include "hf/tokenizer_files.h"

#include <nlohmann/json.hpp>

namespace sluice {
namespace {

using json = nlohmann::ordered_json;

/// UTF-8 of a code point below 0x800.
std::string utf8(int code) {
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3F))};
}

/// The character that stands for a byte in byte-level BPE (GPT-2): printable ones for themselves, the other
/// 68 in order from U+0100 on.
std::string byte_character(int byte) {
  int others = 0;
  for (int b = 0; b <= byte; ++b) {
    const bool itself = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    if (b == byte) return utf8(itself ? b : 0x100 + others);
    if (!itself) ++others;
  }
  return "";
}

/// Byte-level BPE without merges: every byte is a token, and its id.
json byte_tokenizer(int32_t end) {
  json vocabulary = json::object();
  for (int byte = 0; byte < 256; ++byte) vocabulary[byte_character(byte)] = byte;
  const json level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", json::array({{{"id", end},
                                         {"content", "<|endoftext|>"},
                                         {"single_word", false},
                                         {"lstrip", false},
                                         {"rstrip", false},
                                         {"normalized", false},
                                         {"special", true}}})},
          {"normalizer", nullptr},
          {"pre_tokenizer", level},
          {"post_processor", nullptr},
          {"decoder", level},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocabulary},
            {"merges", json::array()}}}};
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
