#include "hf/folder_tokenizer.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "data/byte_level.h"
#include "data/temporary.h"
#include "data/tokenizer.h"

namespace sluice::test {
namespace {

HfModel model(HfFormat format, std::optional<int64_t> begin, std::optional<int64_t> end = {}) {
  HfModel m;
  m.format = format;
  m.begin_token = begin;
  m.begin_stated = format == HfFormat::sluice;
  m.end_token = end;
  return m;
}

}  // namespace

TEST_CASE("the token in front of a text is the one that the folder's tokenizer puts there",
          "[folder_tokenizer]") {
  const TemporaryFolder folder;
  const std::string settings = folder / "tokenizer_config.json", tokenizer = folder / "tokenizer.json";
  const HfModel llama = model(HfFormat::llama, 7), own = model(HfFormat::sluice, 5);
  const auto begin = [&](const HfModel& m) { return folder_begin_token(folder.path, m); };
  // Many models name a bos_token_id that nothing puts in front of a text, Qwen's among them.
  CHECK(begin(llama) == std::nullopt);
  CHECK(begin(own) == 5);
  write_bytes(settings, R"({"add_bos_token": true})");
  CHECK(begin(llama) == 7);
  CHECK(begin(model(HfFormat::llama, {})) == std::nullopt);
  // As Llama 3's.
  write_bytes(settings, R"({"bos_token": "<s>"})");
  const std::string template_of_bos =
      R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
          "special_tokens": {"<s>": {"id": "<s>", "ids": [9], "tokens": ["<s>"]}}})";
  write_bytes(tokenizer, R"({"post_processor": )" + template_of_bos + "}");
  CHECK(begin(llama) == 9);
  write_bytes(tokenizer, R"({"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, )" +
                             template_of_bos + "]}}");
  CHECK(begin(llama) == 9);
  // A folder that has the same words once more in another form.
  write_bytes(folder / "tokenizer.model", "");
  CHECK(begin(llama) == 9);
  write_bytes(settings, R"({"add_bos_token": false})");
  CHECK(begin(llama) == std::nullopt);
  // As Llama 2's and Mistral's first, whose class puts it there by itself.
  write_bytes(tokenizer, "{}");
  for (const char* of_llama : {"{}", R"({"tokenizer_class": "LlamaTokenizer"})"}) {
    write_bytes(settings, of_llama);
    INFO(of_llama);
    CHECK(begin(llama) == 7);
  }
  CHECK(begin(model(HfFormat::qwen3, 7)) == 7);
  write_bytes(settings, R"({"tokenizer_class": "GemmaTokenizer"})");
  CHECK(begin(llama) == std::nullopt);
  std::filesystem::remove(folder / "tokenizer.model");
  write_bytes(settings, "{}");
  for (
      const char* other :
      {R"({"post_processor": null})", R"({"post_processor": {"type": "ByteLevel"}})", R"([1])",
       R"({"post_processor": {"type": "Sequence", "processors": 3}})",
       R"({"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}]}})",
       R"({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}]}})"}) {
    write_bytes(tokenizer, other);
    INFO(other);
    CHECK(begin(llama) == std::nullopt);
  }
}

TEST_CASE("documents of a folder end with its eos_token_id", "[folder_tokenizer]") {
  const TemporaryFolder folder;
  CHECK(folder_tokenizer(folder.path, model(HfFormat::qwen3, {}, 3)) == std::nullopt);
  std::string vocabulary;
  for (int i = 0; i < 256; ++i)
    vocabulary += fmt::format("{}{}: {}", i > 0 ? ", " : "",
                              nlohmann::json(byte_character(static_cast<unsigned char>(i))).dump(), i);
  const auto added = [](int id, const char* content) {
    return fmt::format(R"({{"id": {}, "content": "{}", "single_word": false, "lstrip": false, "rstrip": false,
                           "normalized": false, "special": true}})",
                       id, content);
  };
  write_bytes(folder / "tokenizer.json",
              R"({"added_tokens": [)" + added(256, "<|endoftext|>") + ", " + added(257, "<|im_end|>") +
                  R"(], "normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false,
                  "trim_offsets": true, "use_regex": true}, "decoder": {"type": "ByteLevel"},
                  "model": {"type": "BPE", "vocab": {)" +
                  vocabulary + R"(}, "merges": []}})");
  const auto end = [&](std::optional<int64_t> token) {
    return folder_tokenizer(folder.path, model(HfFormat::qwen3, {}, token))->end_of_document;
  };
  CHECK(end({}).empty());
  CHECK(end(256).empty());  // chosen without being named
  CHECK(end(257) == "<|im_end|>");
  CHECK(end(65).empty());  // no token of its own
  CHECK(make_tokenizer(*folder_tokenizer(folder.path, model(HfFormat::qwen3, {}, 257)))->end_of_document() ==
        257);
  // Another kind of tokenizer is no error until it is opened.
  write_bytes(folder / "tokenizer.json", R"({"model": {"type": "Unigram"}})");
  CHECK(end(257).empty());
}

TEST_CASE("config.json with YaRN has the extended number of positions", "[hf_config]") {
  // Some versions of transformers take the factor from it: max_position_embeddings / original.
  Config config;
  config.data.seq_len = 4096;
  config.model.rope.scaling = {
      .type = RopeScalingType::yarn, .factor = 4, .original_max_position_embeddings = 2048};
  CHECK(hf_config(config, 0, HfFormat::qwen3)["max_position_embeddings"] == 8192);
  config.model.rope.scaling = {};
  CHECK(hf_config(config, 0, HfFormat::qwen3)["max_position_embeddings"] == 4096);
}

}  // namespace sluice::test
