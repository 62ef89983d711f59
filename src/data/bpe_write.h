#pragma once
// A tokenizer.json of byte-level BPE, as Hugging Face's tokenizers write it.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace sluice {

struct BpeText {
  std::vector<std::pair<std::string, int64_t>> special_tokens;  // content and id
  nlohmann::ordered_json normalizer, pre_tokenizer, decoder;    // null: none
  nlohmann::ordered_json vocabulary, merges;                    // {token: id}, [[left, right]]
};

/// The object of a ByteLevel pre-tokenizer or decoder.
nlohmann::ordered_json byte_level_json(bool trim_offsets, bool use_regex);

nlohmann::ordered_json bpe_json(BpeText text);

}  // namespace sluice
