#include "data/bpe_write.h"

namespace sluice {

using Json = nlohmann::ordered_json;

Json byte_level_json(bool trim_offsets, bool use_regex) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", trim_offsets},
          {"use_regex", use_regex}};
}

Json bpe_json(BpeText text) {
  Json added = Json::array();
  for (const auto& [content, id] : text.special_tokens)
    added.push_back({{"id", id},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", std::move(added)},
          {"normalizer", std::move(text.normalizer)},
          {"pre_tokenizer", std::move(text.pre_tokenizer)},
          {"post_processor", nullptr},
          {"decoder", std::move(text.decoder)},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", std::move(text.vocabulary)},
            {"merges", std::move(text.merges)}}}};
}

}  // namespace sluice
