// A tokenizer that loses text is reported wherever its numbers are shown.
#include "data/text_loss.h"

#include "data/small_model.h"
#include "eval/generate.h"
#include "tools/tiny_run.h"

namespace sluice {

using Catch::Contains;
using test::Outcome;
using test::TinyRun;

namespace {

/// Lines of a program, with indentation and line ends.
std::string code(int lines) {
  std::string text;
  for (int i = 0; i < lines; ++i)
    text += fmt::format("        the word {} was gated by head {}\n", i % 97, i % 12);
  return text;
}

/// What `sluice eval --json` says of the set.
nlohmann::json evaluation(const TinyRun& t) {
  const Outcome o = t.sluice({"eval", t.run, "--json"});
  INFO(o.err);
  REQUIRE(o.code == 0);
  return nlohmann::json::parse(o.out)["sets"]["held_out"];
}

/// PREFIX.json with some values replaced; null removes.
void rewrite(const std::string& prefix, const nlohmann::json& changes) {
  auto info = nlohmann::json::parse(io::read_file(prefix + ".json"));
  for (const auto& [key, value] : changes.items()) {
    if (value.is_null())
      info.erase(key);
    else
      info[key] = value;
  }
  test::write_bytes(prefix + ".json", info.dump());
}

}  // namespace

TEST_CASE("text dropped by a normaliser is reported, and counted in bits per byte", "[tokenize]") {
  const TinyRun t;
  const std::string normalising = test::train_model(t.folder, "normalising");
  const std::string lossless = test::train_model(
      t.folder, "lossless", "--normalization_rule_name=identity --remove_extra_whitespaces=false");
  const auto tokenize = [&](const std::string& model, const std::string& text, const std::string& prefix) {
    test::write_bytes(t.folder / "text.txt", text);
    const Outcome o = t.sluice(
        {"tokenize", t.folder / "text.txt", "--tokenizer", model, "--force", "-o", t.folder / prefix});
    INFO(o.err);
    REQUIRE(o.code == 0);
    return o;
  };
  const std::string text = code(400);
  CHECK_THAT(tokenize(lossless, text, "kept").err, !Contains("drops"));
  const auto kept = read_token_file_info(t.folder / "kept");
  CHECK(kept->lost_bytes == 0);
  CHECK(kept->token_bytes == static_cast<int64_t>(text.size()) + 1);  // the space prepended to the text
  CHECK_THAT(t.sluice({"tokenize", t.folder / "text.txt", "-o", t.folder / "bytes"}).err, !Contains("drops"));
  CHECK(read_token_file_info(t.folder / "bytes")->token_bytes == static_cast<int64_t>(text.size()));

  Outcome o = tokenize(normalising, text, "held_out");
  // 8 spaces and the line end of every line are lost, except one space between lines.
  const auto info = read_token_file_info(t.folder / "held_out");
  REQUIRE(info);
  const auto size = static_cast<int64_t>(text.size());
  CHECK(info->text_bytes == size);
  CHECK(info->lost_bytes == 400 * 9 - 399);
  CHECK(info->token_bytes == size - info->lost_bytes + 1);
  const std::string said =
      fmt::format("tokenizer drops {:.1f}% of the text's bytes",
                  100.0 * static_cast<double>(info->lost_bytes) / static_cast<double>(size));
  CHECK_THAT(o.err,
             Contains(said) && Contains("nmt_nfkc") && Contains("normalising.model") && Contains("identity"));
  tokenize(normalising, text, "train");

  t.write_config("");
  std::string config = io::read_file(t.config);
  config.replace(
      config.find("data:\n"), 6,
      "data:\n  allow_overlap: true\n  tokenizer: {type: sentencepiece, path: normalising.model}\n");
  test::write_bytes(t.config, config);
  o = t.train();
  INFO(o.out << o.err);
  REQUIRE(o.code == 0);
  CHECK_THAT(o.out, Contains("held out held_out") && Contains(said));
  CHECK_THAT(t.sluice({"eval", t.run}).out, Contains(said));

  const nlohmann::json counted = evaluation(t);
  CHECK(counted["text_dropped"].get<double>() ==
        Approx(static_cast<double>(info->lost_bytes) / static_cast<double>(size)));
  rewrite(t.folder / "held_out", {{"token_bytes", nullptr}, {"lost_bytes", nullptr}});  // of an older version
  const nlohmann::json uncounted = evaluation(t);
  CHECK_FALSE(uncounted.contains("text_dropped"));
  const double bits = uncounted["bits_per_byte"].get<double>();
  CHECK(counted["bits_per_byte"].get<double>() ==
        Approx(bits * static_cast<double>(info->token_bytes) / static_cast<double>(size)).epsilon(1e-12));
  // Nothing is lost, but each of 40 documents has a space more.
  rewrite(t.folder / "held_out", {{"token_bytes", size + 40}, {"lost_bytes", 0}});
  const nlohmann::json spaces = evaluation(t);
  CHECK_FALSE(spaces.contains("text_dropped"));
  CHECK(spaces["bits_per_byte"].get<double>() ==
        Approx(bits * static_cast<double>(size + 40) / static_cast<double>(size)).epsilon(1e-12));
  rewrite(t.folder / "held_out", {{"token_bytes", size}, {"lost_bytes", 0}});
  CHECK(evaluation(t)["bits_per_byte"].get<double>() == bits);

  // The text behind a prompt begins with the space that SentencePiece drops at the beginning of a text.
  const TrainedModel trained(find_checkpoint(t.run), 1);
  const Tokenizer& tokenizer = trained.tokenizer();
  int words = 0;
  for (const std::string prompt : {"the word", "the", "gated by", "head", "was gated by head"}) {
    std::vector<int32_t> tokens = tokenizer.encode(prompt);
    const size_t start = tokens.size();
    Generator(trained).run(std::vector<int32_t>(tokens), 5, {.temperature = 0}, [&](int32_t token) {
      if (token == tokenizer.end_of_document()) return false;
      tokens.push_back(token);
      return true;
    });
    const std::string whole = tokenizer.decode(tokens);
    words += tokens.size() > start && whole[prompt.size()] == ' ';
    CHECK(t.sluice({"generate", t.run, "-p", prompt, "-n", "5", "--temperature", "0"}).out == whole + "\n");
  }
  CHECK(words > 0);
  rewrite(t.folder / "held_out", {{"lost_bytes", size + 1}});
  CHECK(t.sluice({"eval", t.run}).code == 65);
}

TEST_CASE("long documents need bounded memory, or are refused with their position", "[tokenize]") {
  const TinyRun t;
  const auto peak = [&](const std::string& input, int code, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"tokenize", t.folder / input, "--force", "-o", t.folder / "x"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome o = t.sluice(arguments);
    INFO(input << " " << o.err);
    CHECK(o.code == code);
    return std::make_pair(o.peak_bytes >> 20, o.err);
  };
  // One line that is longer than the read buffer and contains a text like a separator.
  std::string text(size_t{40} << 20, 'a');
  text.replace((size_t{1} << 20) - 1, 15, "b<|endoftext|>\nc");
  test::write_bytes(t.folder / "long.txt", text + "\n<|endoftext|>\nlast");
  CHECK(peak("long.txt", 0).first < 64);
  const TokenFile file(t.folder / "x");
  CHECK(file.num_documents() == 2);
  CHECK(file.num_tokens() == static_cast<int64_t>(text.size()) + 1 + 1 + 4 + 1);
  bool equal = true;
  for (size_t i = 0; i < text.size(); ++i)
    equal &= file.token(static_cast<int64_t>(i)) == static_cast<unsigned char>(text[i]);
  CHECK(equal);
  CHECK(file.token(file.document_end(0) - 1) == 256);

  text.assign(size_t{20} << 20, 'a');
  test::write_bytes(t.folder / "long.jsonl", "{\"text\": \"short\"}\n{\"text\": \"" + text + "\"}\n");
  CHECK(peak("long.jsonl", 0).first < 64 + 4 * 20);
  CHECK(TokenFile(t.folder / "x").num_tokens() == static_cast<int64_t>(text.size()) + 1 + 6);
  CHECK_THAT(peak("long.jsonl", 65, {"--max-document-mb", "10"}).second,
             Contains("long.jsonl:2: the line has more than 10 MiB") && Contains("--max-document-mb"));

  const std::string model = test::train_model(t.folder, "words");
  test::write_bytes(t.folder / "words.txt", "one\n<|endoftext|>\n" + code(60000));
  CHECK_THAT(peak("words.txt", 65, {"--tokenizer", model, "--max-document-mb", "1"}).second,
             Contains("words.txt:3: the document that begins here has more than 1 MiB") &&
                 Contains("<|endoftext|>"));
  peak("words.txt", 0, {"--tokenizer", model});
}

TEST_CASE("a small file that decompresses to a large one needs no more memory than the limit of a document",
          "[tokenize]") {
  const TinyRun t;
  REQUIRE(std::system(("head -c 400000000 /dev/zero | gzip -1 > " + (t.folder / "bomb.jsonl.gz")).c_str()) ==
          0);
  const Outcome o =
      t.sluice({"tokenize", t.folder / "bomb.jsonl.gz", "-o", t.folder / "x", "--max-document-mb", "16"});
  CHECK(o.code == 65);
  CHECK(o.peak_bytes >> 20 < 64);
}

}  // namespace sluice
