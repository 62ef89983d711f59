// sluice synthesize, and a training on what it writes.
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "config/yaml.h"
#include "data/token_file.h"
#include "tools/program.h"

namespace sluice {
namespace {

using namespace test;

Outcome synthesize(const TemporaryFolder& folder, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "synthesize");
  return Program(folder.path, arguments).wait();
}

std::vector<int32_t> tokens_of(const std::string& prefix) {
  const TokenFile file(prefix);
  std::vector<int32_t> tokens(static_cast<size_t>(file.num_tokens()));
  file.read(0, file.num_tokens(), tokens.data());
  return tokens;
}

}  // namespace

TEST_CASE("a task is written, described and trained on", "[synthesize]") {
  TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 200; ++i) text += "the quick brown fox jumps over the lazy dog, and then it sleeps.\n";
  write_bytes(folder / "text.txt", text);
  const Outcome outcome =
      synthesize(folder, {"bigram-backcopy", "--text", folder / "text.txt", "-o", folder / "new/bb",
                          "--documents", "64", "--seq-len", "32", "--triggers", "chars:oe", "--seed", "5",
                          "--validation-prefix", folder / "held", "--validation-documents", "8"});
  INFO(outcome.out << outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK_THAT(outcome.out, Catch::Contains("64 documents of 32 tokens") && Catch::Contains("best loss"));
  CHECK(tokens_of(folder / "new/bb").size() == 64 * 32);
  CHECK(tokens_of(folder / "held").size() == 8 * 32);
  const auto json = nlohmann::json::parse(io::read_file(folder / "new/bb.json"))["synthetic"];
  CHECK(json["parameters"]["seed"] == 5);
  CHECK(json["parameters"]["triggers"] == std::vector<int>{'e', 'o'});
  CHECK(json["parameters"]["text"] == "text.txt");

  // The printed lines are a configuration.
  const size_t at = outcome.out.find("data:\n");
  REQUIRE(at != std::string::npos);
  write_bytes(
      folder / "bb.yaml",
      outcome.out.substr(at) +
          "model: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 1, num_key_value_heads: 1, "
          "head_dim: 16, intermediate_size: 32}\n"
          "train: {max_steps: 2, micro_batch_size: 2, global_batch_size: 4, threads: 1}\n"
          "eval: {every_steps: 2}\n"
          "run_dir: " +
          folder / "run" + "\n");
  const Outcome trained = Program(folder.path, {"train", folder / "bb.yaml"}).wait();
  INFO(trained.out << trained.err);
  CHECK(trained.code == 0);
  CHECK_THAT(trained.out, Catch::Contains("(256 tokens)"));  // all of the held-out documents
  CHECK_THAT(trained.out, !Catch::Contains("in no sample") && !Catch::Contains("tokenizer unknown"));
  const Outcome generated = Program(folder.path, {"generate", folder / "run", "-p", "th", "-n", "5"}).wait();
  CHECK(generated.code == 0);
}

TEST_CASE("recall and induction are written with their best accuracy", "[synthesize]") {
  TemporaryFolder folder;
  const Outcome recall =
      synthesize(folder, {"associative-recall", "-o", folder / "r", "--documents", "3", "--keys", "9",
                          "--values", "7", "--pairs", "5", "--queries", "4"});
  INFO(recall.err);
  REQUIRE(recall.code == 0);
  CHECK(tokens_of(folder / "r").size() == 3 * 18);
  CHECK_THAT(recall.out,
             Catch::Contains("answer") && Catch::Contains("100.00%") &&
                 Catch::Contains("query_classes: [{name: key, tokens: [0, 1, 2, 3, 4, 5, 6, 7, 8]}]"));
  const Outcome induction =
      synthesize(folder, {"induction", "-o", folder / "i", "--documents", "3", "--vocabulary", "20",
                          "--shortest-block", "4", "--longest-block", "10", "--repeats", "3"});
  REQUIRE(induction.code == 0);
  CHECK(tokens_of(folder / "i").size() == 3 * 30);
  CHECK_THAT(induction.out, Catch::Contains("repeat") && !Catch::Contains("query_classes"));
}

TEST_CASE("what cannot be synthesized is refused, and no files are left", "[synthesize]") {
  TemporaryFolder folder;
  write_bytes(folder / "text.txt", "some text that is long enough\n");
  write_bytes(folder / "one.txt", "x");
  write_bytes(folder / "zipped.txt", "\x1f\x8b\x08 zipped");
  const auto refused = [&](int code, const std::string& part, const std::vector<std::string>& arguments) {
    const Outcome outcome = synthesize(folder, arguments);
    INFO(outcome.err);
    CHECK(outcome.code == code);
    CHECK_THAT(outcome.err, Catch::Contains(part));
    CHECK_FALSE(io::exists(folder / "x.bin"));
    CHECK_FALSE(io::exists(folder / "v.bin"));
  };
  const std::string text = folder / "text.txt", x = folder / "x", v = folder / "v";
  const auto with = [&](const std::vector<std::string>& more, const std::string& file = "") {
    std::vector<std::string> arguments = {"bigram-backcopy", "--text", file.empty() ? text : file, "-o", x,
                                          "--documents",     "3"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  refused(64, "required", {"bigram-backcopy", "--text", text, "-o", x});
  refused(64, "--documents: must be from 1 to", {"induction", "-o", x, "--documents", "0"});
  refused(64, "--seq-len 1: must be from 2 to 65536", with({"--seq-len", "1"}));
  refused(64, "--triggers 3: must be auto:K", with({"--triggers", "3"}));
  refused(64, "go together", with({"--validation-prefix", v}));
  refused(64, "go together", with({"--validation-documents", "4"}));
  refused(64, "-o and --validation-prefix are both",
          with({"--validation-prefix", folder / "./x", "--validation-documents", "4"}));
  // Both names are relative, or one of them, and the folder does not exist.
  for (const auto& [a, b] : {std::pair<std::string, std::string>{"y", "./y"},
                             {"y", std::filesystem::current_path() / "y"},
                             {"none/../y", "y"},
                             {"none/y", std::filesystem::current_path() / "none/y"}})
    refused(
        64, "-o and --validation-prefix are both",
        {"induction", "-o", a, "--documents", "3", "--validation-prefix", b, "--validation-documents", "2"});
  CHECK_FALSE(io::exists("y.bin"));
  refused(64, "-o is empty", {"induction", "-o", "", "--documents", "3"});
  for (const std::string& prefix : std::vector<std::string>{".", "..", folder / "new/", folder / "."})
    refused(64, prefix + ": is a folder", {"induction", "-o", prefix, "--documents", "3"});
  refused(64, "(see sluice synthesize induction --help)", {"induction", "--tokens", "1"});
  refused(64, "--seed: must not be negative, got -1", with({"--seed", "-1"}));
  refused(64, "--seed: is too large: 18446744073709551616", with({"--seed", "18446744073709551616"}));
  refused(64, "--seq-len: has a leading zero", with({"--seq-len", "010"}));
  refused(64, "--keys: must be an integer, got 2.5",
          {"associative-recall", "-o", x, "--documents", "1", "--keys", "2.5"});
  refused(64, "give the prefix " + x + "\n", {"induction", "-o", x + ".bin", "--documents", "1"});
  refused(66, "nothing.txt", with({}, folder / "nothing.txt"));
  refused(65, "one.txt: 1 bytes are no text", with({}, folder / "one.txt"));
  refused(65, "zipped.txt: is compressed by gzip", with({}, folder / "zipped.txt"));
  refused(64, "--queries 40: must be from 1 to 32",
          {"associative-recall", "-o", x, "--documents", "1", "--queries", "40"});

  REQUIRE(synthesize(folder, with({})).code == 0);
  const std::vector<int32_t> before = tokens_of(x);
  const Outcome again = synthesize(folder, with({"--seed", "9"}));
  CHECK(again.code == 73);
  CHECK_THAT(again.err, Catch::Contains("x.bin: exists; choose another prefix, or --force"));
  CHECK(tokens_of(x) == before);
  CHECK(synthesize(folder, with({"--seed", "9", "--force"})).code == 0);
  CHECK(tokens_of(x) != before);
}

TEST_CASE("the text of a task is not overwritten by its documents", "[synthesize]") {
  TemporaryFolder folder;
  const std::string text = "some text that is long enough\n";
  write_bytes(folder / "text.json", text);
  for (const char* option : {"-o", "--validation-prefix"}) {
    std::vector<std::string> arguments = {
        "bigram-backcopy", "--text", folder / "text.json", "--documents", "3",
        "--force",         option,   folder / "text"};
    if (option != std::string("-o"))
      arguments.insert(arguments.end(), {"-o", folder / "new", "--validation-documents", "3"});
    const Outcome outcome = synthesize(folder, arguments);
    CHECK(outcome.code == 64);
    CHECK_THAT(outcome.err, Catch::Contains("text.json: is read as an input and would be overwritten"));
    CHECK(io::read_file(folder / "text.json") == text);
    CHECK_FALSE(io::exists(folder / "new.bin"));
  }
}

TEST_CASE("whole numbers of options are those of configurations", "[synthesize]") {
  TemporaryFolder folder;
  const Outcome made = synthesize(
      folder, {"induction", "-o", folder / "x", "--documents", "1k", "--seed", "18446744073709551615"});
  INFO(made.err);
  REQUIRE(made.code == 0);
  CHECK(tokens_of(folder / "x").size() == 1000 * 256);
  const auto json = nlohmann::json::parse(io::read_file(folder / "x.json"))["synthetic"];
  CHECK(json["parameters"]["seed"] == std::numeric_limits<uint64_t>::max());
  // Read before the run is looked for.
  const auto run = [&](const std::vector<std::string>& arguments) {
    return Program(folder.path, arguments).wait();
  };
  CHECK(run({"eval", folder / "none", "--max-tokens", "1k"}).code == 66);
  const Outcome negative = run({"generate", folder / "none", "-p", "a", "--seed", "-1"});
  CHECK(negative.code == 64);
  CHECK_THAT(negative.err, Catch::Contains("--seed: must not be negative, got -1"));
  const Outcome large = run({"plan", folder / "none", "--ranks", "3G"});
  CHECK(large.code == 64);
  CHECK_THAT(large.err, Catch::Contains("--ranks: must be an integer, got 3G (suffixes: k M B T, Ki Mi)"));
  CHECK_THAT(run({"plan", folder / "none", "--ranks", "3B"}).err, Catch::Contains("got 3000000000"));
}

}  // namespace sluice
