#include "data/tokenizer.h"

#include <numeric>

#include "data/small_model.h"

using namespace sluice;
using namespace sluice::test;

namespace {

std::unique_ptr<Tokenizer> load(const std::string& path) {
  return make_tokenizer({TokenizerType::sentencepiece, path, ""});
}

int64_t bytes_of(const Tokenizer& tokenizer, const std::vector<int32_t>& tokens) {
  int64_t sum = 0;
  for (int32_t token : tokens) sum += tokenizer.token_bytes(token);
  return sum;
}

}  // namespace

TEST_CASE("the byte tokenizer is the identity on every byte", "[tokenizer]") {
  const auto tokenizer = make_tokenizer({});
  std::string all(256, '\0');
  std::iota(all.begin(), all.end(), '\0');
  auto tokens = tokenizer->encode(all);
  REQUIRE(tokens.size() == 256);
  CHECK(tokens[0] == 0);
  CHECK(tokens[255] == 255);
  CHECK(tokenizer->decode(tokens) == all);
  CHECK(tokenizer->vocab_size() == 257);
  CHECK(tokenizer->end_of_document() == 256);
  CHECK(bytes_of(*tokenizer, tokens) == 256);
  CHECK(tokenizer->token_bytes(256) == 0);
  tokens.push_back(256);
  CHECK(tokenizer->decode(tokens) == all);  // special tokens are not text
  CHECK(tokenizer->encode("").empty());
  expect_error(ExitCode::data, {"257", "outside"}, [&] { tokenizer->decode({257}); });
  expect_error(ExitCode::data, {"-1", "outside"}, [&] { tokenizer->token_bytes(-1); });
}

TEST_CASE("a SentencePiece model encodes, decodes and counts bytes", "[tokenizer]") {
  TemporaryFolder folder;
  const auto tokenizer = load(train_model(folder, "a", ""));
  CHECK(tokenizer->vocab_size() == 400);
  CHECK(tokenizer->end_of_document() == 2);  // </s>
  CHECK(tokenizer->token_bytes(0) == 0);     // <unk>
  CHECK(tokenizer->is_unknown(0));
  CHECK_FALSE(tokenizer->is_unknown(2));
  CHECK(tokenizer->token_bytes(2) == 0);
  const std::string text = "the word was gated, and attention drains \xe6\xbc\xa2 and \xf0\x9f\x98\x80 too";
  const auto tokens = tokenizer->encode(text);
  CHECK(tokens.size() < text.size());
  CHECK(tokenizer->decode(tokens) == text);
  // Every byte is counted, characters outside the vocabulary (byte pieces) too, and one for the space put in
  // front.
  CHECK(bytes_of(*tokenizer, tokens) == static_cast<int64_t>(text.size()) + 1);
  for (int32_t token : tokens) CHECK((token >= 0 && token < 400));
  auto ended = tokens;
  ended.push_back(tokenizer->end_of_document());
  CHECK(tokenizer->decode(ended) == text);
  expect_error(ExitCode::data, {"400", "outside"}, [&] { tokenizer->decode({400}); });
  expect_error(ExitCode::data, {"-3", "outside"}, [&] { tokenizer->decode({-3}); });
}

TEST_CASE("text behind a prompt keeps the space that a text's first word loses", "[tokenizer]") {
  const test::TemporaryFolder folder;
  for (const char* options : {"", "--add_dummy_prefix=false --remove_extra_whitespaces=false"}) {
    INFO(options);
    const auto tokenizer = load(test::train_model(folder, "behind", options));
    // Divided in every place, with byte pieces, and with characters that begin with the byte of U+FFFD.
    const std::string text = "the word was \xe4\xbd\xa0\xef\xbc\x81 gated by  head 3";
    const std::vector<int32_t> tokens = tokenizer->encode(text);
    const std::string whole = tokenizer->decode(tokens);
    for (size_t n = 0; n <= tokens.size(); ++n) {
      const std::vector<int32_t> before(tokens.begin(), tokens.begin() + static_cast<int64_t>(n)),
          behind(tokens.begin() + static_cast<int64_t>(n), tokens.end());
      const std::string start = tokenizer->decode(before), rest = tokenizer->decode_behind(before, behind);
      INFO(n << ": \"" << start << "\" + \"" << rest << "\"");
      CHECK(whole.ends_with(rest));
      if (whole.starts_with(start)) CHECK(start + rest == whole);  // unless a character is divided
    }
    const std::vector<int32_t> end = {tokenizer->end_of_document()}, words = tokenizer->encode("the word");
    CHECK(tokenizer->decode_behind(end, words) == tokenizer->decode(words));  // a new document
    CHECK(tokenizer->decode_behind({}, words) == tokenizer->decode(words));
    const std::vector<int32_t> word(words.end() - 1, words.end());
    std::vector<int32_t> long_prompt(200, words[0]);
    CHECK(tokenizer->decode_behind(long_prompt, word).starts_with(" "));
  }
  CHECK(make_tokenizer({})->decode_behind({97}, {98}) == "b");
}

TEST_CASE("a SentencePiece model that normalises nothing loses U+2581 alone, and counts it", "[tokenizer]") {
  TemporaryFolder folder;
  const auto tokenizer = load(train_model(folder, "a",
                                          "--normalization_rule_name=identity "
                                          "--remove_extra_whitespaces=false --byte_fallback=true"));
  for (const std::string text : {"a\n  b \xe4\xbd\xa0\t\xc2\xa0 z ", " \xef\xbb\xbf\xe3\x80\x80\r\n"}) {
    const auto tokens = tokenizer->encode(text);
    CHECK(tokenizer->decode(tokens) == text);
    CHECK(tokenizer->lost_bytes(text, tokens) == 0);
  }
  const std::string text =
      "a\xe2\x96\x81"
      "b";
  CHECK(tokenizer->decode(tokenizer->encode(text)) == "a b");
  CHECK(tokenizer->lost_bytes(text, tokenizer->encode(text)) == 3);
}

TEST_CASE("the fingerprint of a SentencePiece model depends on its bytes", "[tokenizer]") {
  TemporaryFolder folder;
  const std::string a = train_model(folder, "a", ""), b = train_model(folder, "b", "--vocab_size=390");
  std::filesystem::copy_file(a, folder / "copy.model");
  CHECK(load(a)->fingerprint() == load(folder / "copy.model")->fingerprint());
  CHECK(load(a)->fingerprint() != load(b)->fingerprint());
  CHECK(load(a)->fingerprint().size() == 5 + 32);
}

TEST_CASE("the end-of-document piece is found, or its absence is reported", "[tokenizer]") {
  TemporaryFolder folder;
  const auto named = load(train_model(folder, "a", "--eos_id=-1 --control_symbols=<|endoftext|>"));
  CHECK(named->token_bytes(named->end_of_document()) == 0);
  CHECK(named->end_of_document() >= 0);
  const std::string none = train_model(folder, "b", "--eos_id=-1");
  expect_error(ExitCode::data, {none, "<|endoftext|>"}, [&] { load(none); });
}

TEST_CASE("absent and damaged SentencePiece models are refused", "[tokenizer]") {
  TemporaryFolder folder;
  expect_error(ExitCode::no_input, {folder / "none.model"}, [&] { load(folder / "none.model"); });
  expect_error(ExitCode::usage, {"data.tokenizer.path"}, [&] { load(""); });
  write_bytes(folder / "text.model", "this is no model at all, but a text of some length");
  expect_error(ExitCode::data, {folder / "text.model"}, [&] { load(folder / "text.model"); });
  write_bytes(folder / "empty.model", "");
  expect_error(ExitCode::data, {folder / "empty.model"}, [&] { load(folder / "empty.model"); });
}
