// Reports on the data before the first step, and when data changes during the run.
#include <unistd.h>

#include <filesystem>

#include "checkpoint/manifest.h"
#include "data/loader.h"
#include "tools/tiny_run.h"

namespace sluice {
namespace {

using Catch::Contains;
using test::Outcome;
using test::TinyRun;

/// A run with PREFIX.json beside its token files, and another set made with another tokenizer.
struct TokenizedRun : TinyRun {
  TokenizedRun() {
    for (const char* name : {"train", "held_out"}) note(name, "byte:257", 257, "byte");
    test::write_corpus(folder / "foreign", 400, 257);
    note("foreign", "xxh3:abc", 512, "sentencepiece other.model");
    std::vector<int32_t> tokens(300, 7);
    tokens.back() = 300;
    test::write_tokens(folder / "last_bad", {tokens}, 1000);
  }
  void note(const std::string& name, const std::string& tokenizer, int64_t vocab_size,
            const std::string& tokenizer_name) const {
    const TokenFile file(folder / name);
    write_token_file_info(folder / name, {tokenizer, vocab_size, 256, file.num_documents(), file.num_tokens(),
                                          1, file.max_token(), tokenizer_name});
  }
};

void expect(const Outcome& outcome, int code, const std::vector<std::string>& parts) {
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == code);
  for (const std::string& part : parts) CHECK_THAT(outcome.err, Contains(part));
}

/// Changes state.json of a run's only checkpoint and updates the manifest accordingly.
template <class Change>
void rewrite_state(const std::string& checkpoint, Change&& change) {
  auto state = nlohmann::json::parse(io::read_file(checkpoint + "/state.json"));
  change(state);
  test::write_bytes(checkpoint + "/state.json", state.dump());
  Manifest manifest = read_manifest(checkpoint);
  for (FileRecord& file : manifest.files)
    if (file.name == "state.json")
      file.bytes = std::ssize(state.dump()), file.xxh3_128 = checksum(state.dump());
  test::write_bytes(checkpoint + "/" + kManifestName, manifest.text());
}

}  // namespace

TEST_CASE("tokens of another tokenizer are refused before training, evaluation and analysis",
          "[data_check]") {
  const TokenizedRun t;
  const std::vector<std::string> both = {"foreign.bin",
                                         "sentencepiece other.model, vocabulary of 512, fingerprint xxh3:abc",
                                         "byte, vocabulary of 257, fingerprint byte:257"};
  const std::vector<std::string> bad = {"last_bad.bin: token 299 is 300", "vocabulary of 257"};
  for (const char* key : {"data.train", "data.validation"}) {
    expect(t.train({fmt::format("{}=[{{name: x, path: {}}}]", key, t.folder / "foreign")}), 65, both);
    expect(t.train({fmt::format("{}=[{{name: x, path: {}}}]", key, t.folder / "last_bad")}), 65, bad);
  }
  CHECK_FALSE(io::exists(t.run + "/metrics.jsonl"));
  const Outcome good = t.train();
  REQUIRE(good.code == 0);
  CHECK_THAT(good.out, !Contains("tokenizer unknown"));
  for (const std::string& command : {std::string("eval"), std::string("analyze")}) {
    std::vector<std::string> arguments = {command, t.run, "--data", "x=" + t.folder / "foreign"};
    if (command == "analyze") arguments.insert(arguments.end(), {"-o", t.folder / "analysis"});
    expect(t.sluice(arguments), 65, both);
    arguments[3] = "x=" + t.folder / "last_bad";
    expect(t.sluice(arguments), 65, bad);
  }
  // The same for a set in the configuration whose files were replaced since.
  t.note("held_out", "xxh3:abc", 512, "sentencepiece other.model");
  expect(t.sluice({"eval", t.run}), 65, {"held_out.bin", both[1]});
}

TEST_CASE("epochs over the data are reported before, during and after training", "[data_check]") {
  const TinyRun t;
  const Outcome outcome = t.train();
  INFO(outcome.out << outcome.err);
  REQUIRE(outcome.code == 0);
  const Blend data({{"tiny", t.folder / "train", 1}}, 16, 257, false, 1);
  const double epochs = 16.0 / static_cast<double>(data.sources()[0].samples);
  CHECK_THAT(outcome.out, Contains(fmt::format("{:.2f} epochs  tokenizer unknown", epochs)));
  CHECK_THAT(outcome.err, !Contains("epochs"));
  std::istringstream metrics(io::read_file(t.run + "/metrics.jsonl"));
  nlohmann::json last;
  for (std::string line; std::getline(metrics, line);) last = nlohmann::json::parse(line);
  CHECK(last["epochs"]["tiny"].get<double>() == Approx(epochs));

  const auto plan = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"plan", t.config});
    const Outcome planned = t.sluice(more);
    INFO(planned.err);
    REQUIRE(planned.code == 0);
    return planned.out;
  };
  CHECK_THAT(plan({}), Contains(fmt::format("100% of the samples, {:.2f} epochs\n", epochs)));
  CHECK_THAT(plan({"train.max_steps=1000"}), Contains("more than 4"));
  const auto json = nlohmann::json::parse(plan({"--json", "train.max_steps=1000"}));
  CHECK(json["data"]["sources"][0]["epochs"].get<double>() == Approx(epochs * 125));
  CHECK(json["data"]["problem"].is_null());
  // Planned on a machine without the data.
  CHECK_THAT(
      nlohmann::json::parse(plan({"--json", "data.train=[{name: x, path: nowhere}]"}))["data"]["problem"]
          .get<std::string>(),
      Contains("nowhere"));
  expect(t.train({"data.seq_len=4", "train.global_batch_size=10", "train.micro_batch_size=10",
                  "train.max_steps=600", "run_dir=" + t.folder / "many",
                  "data.train=[{name: short, path: " + t.folder / "held_out" + "}]", "data.validation=[]"}),
         0, {"data source short is repeated for 4", "beyond about 4 epochs"});
}

TEST_CASE("files that are too short for a sample are counted by plan, banner and a warning", "[data_check]") {
  const TinyRun t;
  // Samples of 16 and one more target: 593 tokens of the long file are in one, and none of the short ones.
  io::make_directories(t.folder / "parts");
  test::write_tokens(t.folder / "parts/a", {std::vector<int32_t>(601, 5)}, 257);
  for (int i = 0; i < 40; ++i)
    test::write_tokens(t.folder / fmt::format("parts/b{}", i), {std::vector<int32_t>(16, i)}, 257);
  const std::string sources = "data.train=[{name: parts, path: '" + (t.folder / "parts/*.bin") + "'}]";
  const std::string share = "  52.2% of them in no sample  40 of 41 files without a sample";  // 648 of 1241
  const Outcome planned = t.sluice({"plan", t.config, sources});
  CHECK_THAT(planned.out, Contains(share));
  const auto json = nlohmann::json::parse(t.sluice({"plan", t.config, "--json", sources}).out)["data"];
  REQUIRE(json["sources"][0].contains("files_without_sample"));
  CHECK(json["sources"][0]["unread_tokens"] == 648);
  CHECK(json["sources"][0]["files"] == 41);
  CHECK(json["sources"][0]["files_without_sample"] == 40);
  const Outcome trained = t.train({sources});
  INFO(trained.err);
  REQUIRE(trained.code == 0);
  CHECK_THAT(trained.out, Contains(" tokens in 41 files" + share));
  CHECK_THAT(trained.err,
             Contains("data source parts: 40 of 41 files are without a sample, so they are never "
                      "trained on: they are too short for one of data.seq_len tokens"));
  // With a begin token a sample is 16 tokens of a document, and each file has one.
  const Outcome begun = t.sluice({"plan", t.config, "--json", sources, "data.begin_token=256"});
  CHECK(nlohmann::json::parse(begun.out)["data"]["sources"][0]["files_without_sample"] == 0);
  const Outcome whole = t.train({"--run-dir", t.folder / "whole"});
  CHECK_THAT(whole.err, !Contains("without a sample"));
}

TEST_CASE("a validation set within the training data is refused unless allowed", "[data_check]") {
  const TinyRun t;
  const std::string same = "data.validation=[{name: seen, path: " + t.folder / "train" + "}]";
  expect(t.train({same}), 65,
         {"validation set seen", "train.bin is the same file as", "training source tiny",
          "data.allow_overlap=true"});
  CHECK_FALSE(io::exists(t.run + "/metrics.jsonl"));
  expect(t.train({same, "data.allow_overlap=true"}), 0, {});
}

TEST_CASE("truncating a token file in use ends the training with the name of the file", "[data_check]") {
  const TinyRun t;
  const int64_t left = GENERATE(0, 100);
  test::Program program(
      t.folder.path,
      t.train_arguments({"train.max_steps=1000000", "checkpoint.every_steps=50", "checkpoint.async=true"}));
  REQUIRE(test::wait_until([&] {
    return io::exists(t.run + "/metrics.jsonl") && io::file_size(t.run + "/metrics.jsonl") > 20'000;
  }));
  REQUIRE(::truncate((t.folder / "train.bin").c_str(), left) == 0);
  const Outcome outcome = program.wait();
  expect(outcome, 65, {"train.bin: was truncated while in use", fmt::format("now has {}", left)});
  const auto status = test::status_of(t.run);
  CHECK(status["state"] == "failed");
  CHECK(status["exit_code"] == 65);
  for (const std::string& name : io::list_directory(t.run + "/ckpt"))
    CHECK((name == "LATEST" || name.rfind("step_", 0) == 0));
}

TEST_CASE("one changed token between stop and resume is detected; older fingerprints still work",
          "[data_check]") {
  const TinyRun t;
  std::vector<int32_t> tokens(400'000);  // more than the sampled pages
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * 2654435761u >> 16 & 0xff);
  const auto write = [&] { test::write_tokens(t.folder / "train", {tokens}, 257); };
  write();
  REQUIRE(t.train({"train.max_steps=4"}).code == 0);
  const std::vector<std::string> longer = {"train.max_steps=6", "--allow-change", "train.max_steps"};
  tokens[5000] ^= 1;
  write();
  expect(t.train(longer), 64,
         {"cannot resume", "the training data is not the data that this run was started with"});
  tokens[5000] ^= 1;
  write();
  const std::string sampled = Blend({{"x", t.folder / "train", 1}}, 16, 257, false, 1).sampled_fingerprint();
  CHECK(sampled.rfind("xxh3:", 0) == 0);
  rewrite_state(t.run + "/ckpt/step_00000004", [&](nlohmann::json& state) {
    CHECK(state["data_fingerprint"].get<std::string>().rfind("xxh3-whole:", 0) == 0);
    state["data_fingerprint"] = sampled;
  });
  expect(t.train(longer), 0, {});
  // After another save it has the new form.
  CHECK(nlohmann::json::parse(io::read_file(t.run + "/ckpt/step_00000006/state.json"))["data_fingerprint"]
            .get<std::string>()
            .rfind("xxh3-whole:", 0) == 0);
}

TEST_CASE("a set without predicted tokens has no loss", "[data_check]") {
  const TinyRun t;
  // Documents of one token first: the evaluated part contains nothing to predict.
  std::vector<std::vector<int32_t>> documents(100, {5});
  documents.push_back({1, 2, 3});
  test::write_tokens(t.folder / "sparse", documents, 257);
  documents.pop_back();
  test::write_tokens(t.folder / "ones", documents, 257);
  const std::string mask = "data.document_mask=true";
  expect(t.train({mask, "data.validation=[{name: v, path: " + t.folder / "ones" + "}]"}), 65,
         {"data source v", "one token each", "data.document_mask=false"});
  const Outcome trained =
      t.train({mask, "data.validation=[{name: v, path: " + t.folder / "sparse" + "}]", "eval.max_tokens=32"});
  INFO(trained.out << trained.err);
  REQUIRE(trained.code == 0);
  CHECK_THAT(trained.out, Contains("val v  no token was predicted: no loss") && !Contains("0.0000"));
  const auto set = nlohmann::json::parse(io::read_file(t.run + "/eval.jsonl"))["sets"]["v"];
  for (const char* key : {"loss", "perplexity", "bits_per_byte"}) CHECK(set[key].is_null());
  CHECK(set["tokens"] == 0);
  const Outcome table = t.sluice({"eval", t.run, "--max-tokens", "32"});
  CHECK(table.code == 0);
  CHECK_THAT(table.out, Contains("v" + std::string(32, ' ') + "-           -           -           0"));

  // A training step without a predicted token changes nothing and has no loss.
  expect(t.train({mask, "run_dir=" + t.folder / "steps", "data.validation=[]", "log.every_steps=1",
                  "data.train=[{name: s, path: " + t.folder / "sparse" + "}]"}),
         0, {"none of its tokens is predicted"});
  CHECK_THAT(t.curve(t.folder / "steps"), !Contains(" 0.0 "));
}

}  // namespace sluice
