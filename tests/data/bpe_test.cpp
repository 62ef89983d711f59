// Byte-level BPE against the ids of Hugging Face's tokenizers (scripts/check_tokenizers --goldens), and its
// training.
#include "data/bpe.h"

#include <nlohmann/json.hpp>

#include "core/io.h"
#include "core/parallel_for.h"
#include "data/bpe_trainer.h"
#include "data/byte_level.h"
#include "data/document_reader.h"
#include "data/temporary.h"
#include "data/unicode_form.h"

using namespace sluice;
using namespace sluice::test;
using nlohmann::json;

namespace {

const std::string kGolden = SLUICE_SOURCE_DIR "/tests/golden/tokenizers/";

json golden() { return json::parse(io::read_file(kGolden + "gpt2.json")); }

/// A golden tokenizer, changed.
void write_changed(const std::string& path, const std::function<void(json&)>& change) {
  json file = golden();
  change(file);
  write_bytes(path, file.dump());
}

/// Bytes that are not UTF-8 replaced, as that library does.
std::string lossy(const std::string& text) {
  return json::parse(json(text).dump(-1, ' ', false, json::error_handler_t::replace));
}

BpeTrained trained(const BpeTraining& training, const std::vector<std::string>& documents) {
  BpeTrainer trainer(training);
  trainer.count(documents);
  return trainer.train();
}

}  // namespace

TEST_CASE("tokens are those of Hugging Face's tokenizers", "[bpe]") {
  const json cases = json::parse(io::read_file(kGolden + "cases.json"));
  const std::vector<std::string> texts = cases["texts"];
  REQUIRE(texts.size() == 40);
  int compared = 0;
  for (const auto& [family, expected] : cases["families"].items()) {
    const auto tokenizer = make_bpe_tokenizer(kGolden + family + ".json");
    for (size_t i = 0; i < texts.size(); ++i) {
      INFO(family << ": " << json(texts[i]).dump(-1, ' ', true));
      const std::string key = std::to_string(i);
      const std::vector<int32_t> special = expected["special"][i];
      const std::vector<int32_t> plain = expected["plain"].value(key, special);
      CHECK(tokenizer->encode_with_special(texts[i]) == special);
      CHECK(tokenizer->encode(texts[i]) == plain);
      CHECK(lossy(tokenizer->decode(special)) == expected["decoded"].value(key, texts[i]));
      ++compared;
    }
  }
  CHECK(compared == 9 * 40);
}

TEST_CASE("short and long pieces are merged alike, whatever was met before", "[bpe]") {
  const auto tokenizer = make_bpe_tokenizer(kGolden + "gpt2.json"),
             fresh = make_bpe_tokenizer(kGolden + "gpt2.json");
  // Merges of a long piece are those of the same letters with one more behind it that nothing merges with.
  for (int length = 1; length < 130; ++length) {
    std::string letters;
    for (int i = 0; i < length; ++i) letters += "abtheinr"[(i * i + length) % 8];
    const auto once = tokenizer->encode(letters);
    CHECK(tokenizer->encode(letters) == once);
    CHECK(fresh->decode(once) == letters);
    auto longer = tokenizer->encode(letters + std::string(100, 'Q'));
    REQUIRE(longer.size() > 100);
    longer.resize(longer.size() - 100);
    CHECK(longer == once);
  }
}

TEST_CASE("nothing is lost of bytes that are not UTF-8", "[bpe]") {
  for (const char* family : {"gpt2", "llama3", "qwen2"}) {
    const auto tokenizer = make_bpe_tokenizer(kGolden + family + ".json");
    for (const std::string text :
         {"\xff", "a\xffz", "\xe4\xbd", "x \xf0\x9f\x98 \x80\x80 y", "\xc3\xa9\xc3"}) {
      const auto tokens = tokenizer->encode(text);
      CHECK(tokenizer->decode(tokens) == text);
      CHECK(tokenizer->lost_bytes(text, tokens) == 0);
    }
  }
}

TEST_CASE("bytes of tokens, special tokens, the end of documents", "[bpe]") {
  const auto tokenizer = make_tokenizer(tokenizer_config(kGolden + "gpt2.json"));
  CHECK(tokenizer->vocab_size() == 320);
  CHECK(tokenizer->end_of_document() == 0);
  CHECK(tokenizer->token_bytes(0) == 0);
  CHECK(tokenizer->decode({0, 1}).empty());
  CHECK(tokenizer->fingerprint().size() == 5 + 32);
  CHECK(tokenizer->model() == io::read_file(kGolden + "gpt2.json"));
  int64_t bytes = 0;
  const std::string text = "don't \xe4\xbd\xa0\xe5\xa5\xbd <|endoftext|>";
  for (const int32_t token : tokenizer->encode(text)) bytes += tokenizer->token_bytes(token);
  CHECK(bytes == std::ssize(text));
  CHECK(tokenizer->encode_with_special("a<|endoftext|>b").at(1) == 0);
  CHECK(make_bpe_tokenizer(kGolden + "gpt2.json", "<|im_start|>")->end_of_document() == 1);
  expect_error(ExitCode::usage, {"end_of_document", "<none>"},
               [] { make_bpe_tokenizer(kGolden + "gpt2.json", "<none>"); });
  expect_error(ExitCode::data, {"320", "outside"}, [&] { tokenizer->decode({320}); });
  // Composition changes bytes, which counts as lost.
  const auto qwen = make_bpe_tokenizer(kGolden + "qwen2.json");
  CHECK(qwen->lost_bytes("e\xcc\x81", qwen->encode("e\xcc\x81")) == 3);
}

TEST_CASE("damaged and foreign tokenizer files are refused by key", "[bpe]") {
  TemporaryFolder folder;
  const std::string path = folder / "t.json";
  struct Case {
    std::function<void(json&)> change;
    std::string message;
  };
  const std::vector<Case> cases = {
      {[](json& f) { f["model"]["type"] = "Unigram"; }, "model.type: Unigram is not supported"},
      {[](json& f) { f.erase("model"); }, "model: there is none"},
      {[](json& f) {
         f["normalizer"] = {{"type", "Lowercase"}};
       },
       "normalizer: Lowercase is not supported"},
      {[](json& f) { f["pre_tokenizer"] = nullptr; }, "pre_tokenizer: there is none"},
      {[](json& f) { f["pre_tokenizer"]["type"] = "Metaspace"; },
       "pre_tokenizer: type Metaspace, but byte-level BPE ends with ByteLevel"},
      {[](json& f) {
         f["pre_tokenizer"] = {
             {"type", "Sequence"},
             {"pretokenizers",
              {{{"type", "Split"}, {"pattern", {{"Regex", "(a"}}}, {"behavior", "Isolated"}},
               f["pre_tokenizer"]}}};
       },
       "pretokenizers[0].pattern: the regular expression (a is not valid"},
      {[](json& f) {
         f["pre_tokenizer"] = {
             {"type", "Sequence"},
             {"pretokenizers",
              {{{"type", "Split"}, {"pattern", {{"Regex", "a\\b"}}}, {"behavior", "Isolated"}},
               f["pre_tokenizer"]}}};
       },
       "has, at character 2, this escape, which is not supported"},
      {[](json& f) {
         f["decoder"] = {{"type", "Metaspace"}};
       },
       "decoder: Metaspace is not supported"},
      {[](json& f) { f["model"]["vocab"]["a"] = -1; }, "model.vocab[\"a\"]: an id must be a whole number"},
      {[](json& f) { f["model"]["vocab"]["a"] = 4000000000u; },
       "an id must be a whole number from 0 to 9999999"},
      {[](json& f) { f["model"]["vocab"]["a"] = f["model"]["vocab"]["b"]; }, "another token has the id"},
      {[](json& f) { f["model"]["merges"][3] = "a"; }, "model.merges[3]: must be two tokens"},
      {[](json& f) {
         f["model"]["merges"][2] = {"a", "zq"};
       },
       "model.merges[2]: zq is not in model.vocab"},
      {[](json& f) { f["added_tokens"][1]["content"] = ""; }, "added_tokens[1].content: must be a text"},
      {[](json& f) { f["added_tokens"][1]["id"] = 77; },
       "added_tokens[1].id: is 77, but model.vocab gives 1"},
      {[](json& f) { f["added_tokens"][1]["special"] = 3; },
       "added_tokens[1].special: must be true or false"},
      {[](json& f) { f["model"]["dropout"] = 0.5; }, "model.dropout"},
      {[](json& f) { f["model"]["unk_token"] = "nowhere"; },
       "model.unk_token: nowhere is not in model.vocab"},
      {[](json& f) {
         f["model"]["vocab"].erase("<|endoftext|>");
         f["added_tokens"].erase(0);
       },
       "has none of <|endoftext|>"},
  };
  for (const Case& c : cases) {
    write_changed(path, c.change);
    expect_error(ExitCode::data, {path, c.message}, [&] { make_bpe_tokenizer(path); });
  }
  write_bytes(path, "\n\x0e...");
  expect_error(ExitCode::data, {path, "type: sentencepiece"}, [&] { make_bpe_tokenizer(path); });
  write_bytes(path, golden().dump());
  expect_error(ExitCode::data, {path, "type: bpe"}, [&] {
    make_tokenizer({TokenizerType::sentencepiece, path, ""});
  });
  expect_error(ExitCode::no_input, {"nothing.json"}, [&] { make_bpe_tokenizer(folder / "nothing.json"); });
}

TEST_CASE("bytes without a token become the unknown token, or nothing", "[bpe]") {
  TemporaryFolder folder;
  const auto without_x = [](json& file) { file["model"]["vocab"].erase("x"); };
  const auto drop_merges = [](json& file) { file["model"]["merges"] = json::array(); };
  write_changed(folder / "a.json", [&](json& f) { without_x(f), drop_merges(f); });
  const auto dropping = make_bpe_tokenizer(folder / "a.json");
  CHECK(dropping->decode(dropping->encode("axxb")) == "ab");
  CHECK(dropping->lost_bytes("axxb", dropping->encode("axxb")) == 2);
  for (const bool fuse : {false, true}) {
    write_changed(folder / "b.json", [&](json& f) {
      without_x(f), drop_merges(f);
      f["model"]["unk_token"] = "<|im_start|>";
      f["model"]["fuse_unk"] = fuse;
    });
    const auto unknown = make_bpe_tokenizer(folder / "b.json");
    const std::vector<int32_t> tokens = unknown->encode("axxb");
    CHECK(tokens.size() == (fuse ? 3 : 4));
    CHECK(unknown->is_unknown(tokens[1]));
    CHECK_FALSE(unknown->is_unknown(tokens[0]));
  }
}

TEST_CASE("text that the pre-tokenizer removes counts as lost", "[bpe]") {
  TemporaryFolder folder;
  const std::string text = "four score and seven years ago";
  for (const bool adds_space : {false, true}) {
    INFO(adds_space);
    write_changed(folder / "r.json", [&](json& f) {
      const json split = {{"type", "Split"}, {"pattern", {{"String", " "}}}, {"behavior", "Removed"}};
      f["pre_tokenizer"]["add_prefix_space"] = adds_space;
      f["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, f["pre_tokenizer"]}}};
    });
    const auto tokenizer = make_bpe_tokenizer(folder / "r.json");
    const auto tokens = tokenizer->encode(text);
    CHECK(tokenizer->normalization() == "no normaliser, and a pre-tokenizer that removes text");
    CHECK(tokenizer->lost_bytes(text, tokens) == 5);  // the spaces put in front of pieces are others
    CHECK(tokenizer->decode(tokens) ==
          (adds_space ? " four score and seven years ago" : "fourscoreandsevenyearsago"));
  }
  // Other behaviours keep all, with a space in front or without.
  const auto spaced = make_bpe_tokenizer(kGolden + "gpt2-space.json");
  CHECK(spaced->lost_bytes(text, spaced->encode(text)) == 0);
}

TEST_CASE("no text becomes the token that ends documents", "[bpe]") {
  TemporaryFolder folder;
  const std::string path = folder / "e.json", text = "a<|endoftext|>b";
  for (const bool normalized : {false, true}) {
    write_changed(path, [&](json& f) {
      f["added_tokens"][0]["special"] = false;
      f["added_tokens"][0]["normalized"] = normalized;
    });
    const auto tokenizer = make_bpe_tokenizer(path);
    const auto tokens = tokenizer->encode(text);
    CHECK(std::count(tokens.begin(), tokens.end(), tokenizer->end_of_document()) == 0);
    CHECK(tokenizer->decode(tokens) == text);
    CHECK(tokenizer->lost_bytes(text, tokens) == 0);
    CHECK(tokenizer->encode_with_special(text).at(1) == tokenizer->end_of_document());
  }
  // Nor a whole piece.
  write_changed(path, [](json& f) {
    f["model"]["ignore_merges"] = true;
    f["pre_tokenizer"]["use_regex"] = false;
  });
  const auto whole = make_bpe_tokenizer(path);
  CHECK(whole->decode(whole->encode("<|endoftext|>")) == "<|endoftext|>");
  // A token of the vocabulary that text is made of.
  expect_error(ExitCode::data, {path, "documents cannot end with a, which stands for a byte of text"},
               [&] { make_bpe_tokenizer(path, "a"); });
  expect_error(ExitCode::data,
               {path, "which text is merged to; name another token by data.tokenizer.end_of_document"}, [&] {
                 make_bpe_tokenizer(path, golden()["model"]["merges"][0][0].get<std::string>() +
                                              golden()["model"]["merges"][0][1].get<std::string>());
               });
  write_changed(path, [](json& f) {
    f["model"]["vocab"].erase("x");
    f["model"]["merges"] = json::array();
    f["model"]["unk_token"] = "<|endoftext|>";
  });
  expect_error(ExitCode::data, {path, "which bytes without a token become"},
               [&] { make_bpe_tokenizer(path); });
}

TEST_CASE("a token that decodes to other bytes than were read counts as lost", "[bpe]") {
  TemporaryFolder folder;
  // Its letters are the alphabet's for the bytes E9 and 61, to which it decodes there and here.
  write_changed(folder / "l.json", [](json& f) {
    f["added_tokens"].push_back({{"id", 320},
                                 {"content",
                                  "\xc3\xa9"
                                  "a"},
                                 {"special", false}});
  });
  const auto tokenizer = make_bpe_tokenizer(folder / "l.json");
  const std::string text =
      "th\xc3\xa9"
      "a";
  const auto tokens = tokenizer->encode(text);
  CHECK(tokens.back() == 320);
  CHECK(tokenizer->decode(tokens) ==
        "th\xe9"
        "a");
  CHECK(tokenizer->lost_bytes(text, tokens) == 2);
  CHECK_THAT(tokenizer->normalization(), Catch::Contains("tokens that stand for other bytes"));
  // So does a special token that merges lead to.
  write_changed(folder / "m.json", [](json& f) {
    const json merge = f["model"]["merges"][0];
    const std::string content = merge[0].get<std::string>() + merge[1].get<std::string>();
    f["added_tokens"].push_back(
        {{"id", f["model"]["vocab"][content]}, {"content", content}, {"special", true}});
  });
  const json merge = golden()["model"]["merges"][0];
  std::string merged;
  for (const json& part : merge) merged += *bytes_of_characters(part.get<std::string>());
  const auto special = make_bpe_tokenizer(folder / "m.json");
  CHECK(special->lost_bytes(merged, special->encode(merged)) == std::ssize(merged));
}

TEST_CASE("a regular expression without end is stopped", "[bpe]") {
  TemporaryFolder folder;
  write_changed(folder / "slow.json", [](json& f) {
    const json split = {
        {"type", "Split"}, {"pattern", {{"Regex", "(?:a+)+(?:a+)+(?:a+)+b"}}}, {"behavior", "Isolated"}};
    f["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, f["pre_tokenizer"]}}};
  });
  const auto tokenizer = make_bpe_tokenizer(folder / "slow.json");
  expect_error(ExitCode::data, {"slow.json", "limit"},
               [&] { tokenizer->encode(std::string(60, 'a') + "cb"); });
  // What is merely long is not stopped.
  const auto llama = make_bpe_tokenizer(kGolden + "llama3.json");
  const std::string spaces(3 << 20, ' ');
  CHECK(llama->decode(llama->encode(spaces)).size() == spaces.size());
}

TEST_CASE("Unicode forms", "[bpe]") {
  CHECK(to_unicode_form("A\xcc\x8a", UnicodeForm::nfc) == "\xc3\x85");
  CHECK(to_unicode_form("\xc3\x85", UnicodeForm::nfd) == "A\xcc\x8a");
  CHECK(to_unicode_form("\xef\xac\x81", UnicodeForm::nfkc) == "fi");
  CHECK(to_unicode_form("\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab", UnicodeForm::nfc) ==
        "\xed\x95\x9c");                                                                    // Hangul
  CHECK(to_unicode_form("a\xcc\x81\xcc\xa3", UnicodeForm::nfc) == "\xe1\xba\xa1\xcc\x81");  // order
  CHECK(to_unicode_form("\xec\x96\xb4\xe1\x86\xa7", UnicodeForm::nfc) ==
        "\xec\x96\xb4\xe1\x86\xa7");  // U+11A7
  // A mark of Unicode 10 stays where it is, and keeps others from combining across it.
  CHECK(to_unicode_form("e\xe1\xb7\xb6\xcc\x81", UnicodeForm::nfc) == "e\xe1\xb7\xb6\xcc\x81");
  // What passes the quick look is in NFC: every character alone, and behind a letter.
  for (char32_t c = 0; c < 0x20000; ++c) {
    if (c >= 0xd800 && c < 0xe000) continue;
    std::string one = "e";
    append_utf8(one, c);
    if (!plainly_nfc(one)) continue;
    std::string apart =
        to_unicode_form(to_unicode_form(one, UnicodeForm::nfd) + "\xcd\x8f", UnicodeForm::nfc);
    if (apart != one + "\xcd\x8f") FAIL_CHECK("U+" << std::hex << static_cast<uint32_t>(c));
  }
  // Linear, or nearly so, where marks are many.
  std::string marks = "a";
  for (int i = 0; i < 50000; ++i) marks += i % 2 ? "\xcc\x81" : "\xcc\xa3";
  CHECK(to_unicode_form(marks, UnicodeForm::nfc).size() > 99000);
}

TEST_CASE("Unicode forms of every character are those of Hugging Face's tokenizers", "[bpe]") {
  std::vector<std::string> texts(17);
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xd800 && c < 0xe000) continue;
    std::string& text = texts[c >> 16];
    text += 'a';
    append_utf8(text, c);
    text += "\xcc\xa3";
  }
  const json expected = json::parse(io::read_file(kGolden + "forms.json"));
  for (const auto& [name, form] : {std::pair{"NFC", UnicodeForm::nfc},
                                   {"NFD", UnicodeForm::nfd},
                                   {"NFKC", UnicodeForm::nfkc},
                                   {"NFKD", UnicodeForm::nfkd}}) {
    uint64_t sum = 0;
    for (const std::string& text : texts) {
      const std::string normal = to_unicode_form(text, form);
      for (size_t at = 0; at < normal.size();) sum = sum * 31 + next_character(normal, at);
    }
    INFO(name);
    CHECK(fmt::format("{:016x}", sum) == expected[name]);
  }
  // The square era name REIWA came with Unicode 12.1, and is not taken apart as its elders are.
  CHECK(to_unicode_form("\xe3\x8b\xbf", UnicodeForm::nfkc) == "\xe3\x8b\xbf");
  CHECK(to_unicode_form("\xe3\x8d\xbb", UnicodeForm::nfkc) == "\xe5\xb9\xb3\xe6\x88\x90");
}

TEST_CASE("training merges the most frequent pairs", "[bpe]") {
  TemporaryFolder folder;
  BpeTraining training;
  training.vocab_size = 260;
  training.pretokenizer = "gpt2";
  // ab 5 times; then "ab ab" and "space ab" twice each, of which the space has the lower id; then nothing
  // twice.
  const BpeTrained result = trained(training, {"abab abab ab"});
  write_bytes(folder / "t.json", result.json);
  const json model = json::parse(result.json)["model"];
  REQUIRE(model["merges"].size() == 2);
  CHECK(model["merges"][0] == json({"a", "b"}));
  CHECK(model["merges"][1] == json({"\xc4\xa0", "ab"}));
  const auto tokenizer = make_bpe_tokenizer(folder / "t.json");
  CHECK(tokenizer->end_of_document() == 0);
  CHECK(tokenizer->decode(tokenizer->encode("any \xe4\xbd\xa0 text\n")) == "any \xe4\xbd\xa0 text\n");
  CHECK(tokenizer->encode("abab ab").size() == 3);
}

TEST_CASE("training depends on the text alone, not on threads or order", "[bpe]") {
  std::vector<std::string> documents;
  for (int i = 0; i < 300; ++i)
    documents.push_back(fmt::format("the {} word of {} sinks and gates {}\n", i % 7, i * i, i % 11));
  BpeTraining training;
  training.vocab_size = 350;
  const int threads = num_threads();
  set_num_threads(1);
  const std::string one = trained(training, documents).json;
  set_num_threads(3);
  std::reverse(documents.begin(), documents.end());
  const std::string three = trained(training, documents).json;
  set_num_threads(threads);
  CHECK(one == three);
  CHECK(json::parse(one)["model"]["vocab"].size() == 350);
  training.special_tokens = {"<s>", "</s>"};
  CHECK(json::parse(trained(training, documents).json)["added_tokens"].size() == 2);
  // No pair is frequent enough.
  training.min_frequency = 1000000;
  CHECK(trained(training, documents).vocab_size == 258);
}

TEST_CASE("impossible trainings are refused", "[bpe]") {
  BpeTraining training;
  training.vocab_size = 256;
  expect_error(ExitCode::usage, {"--vocab-size 256", "257"}, [&] { BpeTrainer{training}; });
  training.vocab_size = 300;
  training.special_tokens = {"a"};
  expect_error(ExitCode::usage, {"--special-token a", "byte"}, [&] { BpeTrainer{training}; });
  training.special_tokens = {"<a>", "<a>"};
  expect_error(ExitCode::usage, {"<a>", "twice"}, [&] { BpeTrainer{training}; });
  training.special_tokens = {};
  training.pretokenizer = "gpt9";
  expect_error(ExitCode::usage, {"gpt9", "llama3"}, [&] { BpeTrainer{training}; });
  training.pretokenizer = "gpt2";
  expect_error(ExitCode::data, {"no text"}, [&] { BpeTrainer{training}.train(); });
}

TEST_CASE("long texts are cut where every pre-tokenizer cuts", "[bpe]") {
  TemporaryFolder folder;
  std::string text;
  while (text.size() < (3u << 20)) text += "a line, with 12 numbers\n  and  spaces\n\n\"quotes\"\nmore\n";
  write_bytes(folder / "long.txt", text);
  std::vector<std::string> parts;
  read_documents(folder / "long.txt", {}, [&](std::string part) { parts.push_back(std::move(part)); });
  REQUIRE(parts.size() == 3);
  for (const char* family : {"gpt2", "llama3", "qwen2"}) {
    const auto tokenizer = make_bpe_tokenizer(kGolden + family + ".json");
    std::vector<int32_t> joined;
    for (const std::string& part : parts) {
      const auto tokens = tokenizer->encode(part);
      joined.insert(joined.end(), tokens.begin(), tokens.end());
    }
    CHECK(joined == tokenizer->encode(text));
  }
}
