// A BPE tokenizer through the whole house: trained, used for token files, a training and its tasks and
// samples, and kept in the run. And sluice watch.
#include <filesystem>

#include "data/token_file.h"
#include "tools/tiny_run.h"

namespace sluice {
namespace {

using namespace test;

std::string text() {
  std::string all;
  for (int i = 0; i < 400; ++i)
    all += fmt::format(
        "the {} gate of the house with number {} opens without a sound \xe4\xbd\xa0\xe5\xa5\xbd\n", i % 9,
        i % 13);
  return all;
}

}  // namespace

TEST_CASE("a BPE tokenizer is trained, used and kept", "[tokenizer]") {
  TinyRun t;
  write_bytes(t.folder / "text.txt", text() + "<|endoftext|>\n" + text());
  const std::string file = t.folder / "t.json";
  const Outcome made =
      t.sluice({"tokenizer", "train", t.folder / "text.txt", "-o", file, "--vocab-size", "290"});
  INFO(made.err);
  REQUIRE(made.code == 0);
  CHECK_THAT(made.out, Catch::Contains("290 tokens, 33 merges"));
  const Outcome again =
      t.sluice({"tokenizer", "train", t.folder / "text.txt", "-o", file, "--vocab-size", "290"});
  CHECK(again.code == 73);
  CHECK(t.sluice({"tokenizer", "train", t.folder / "text.txt", "-o", file, "--vocab-size", "9", "--force"})
            .code == 64);

  const Outcome tokens =
      t.sluice({"tokenize", t.folder / "text.txt", "-o", t.folder / "train", "--tokenizer", file,
                "--validation-prefix", t.folder / "held_out", "--validation-every", "2", "--force"});
  INFO(tokens.err);
  REQUIRE(tokens.code == 0);
  const auto info = read_token_file_info(t.folder / "train");
  REQUIRE(info);
  CHECK(info->vocab_size == 290);
  CHECK(info->text_bytes == std::ssize(text()));
  CHECK(info->lost_bytes == 0);

  write_bytes(t.folder / "task.jsonl",
              "{\"context\": \"the 1 gate\", \"choices\": [\" of\", \" opens\"], \"answer\": 0}\n"
              "{\"context\": \"the 2 gate\", \"choices\": [\" of\", \" opens\"], \"answer\": 0}\n");
  t.write_config("eval: {tasks: [" + (t.folder / "task.jsonl") +
                 "], shots: 1, prompts: [the 3], prompt_tokens: 5}\n");
  const std::vector<std::string> keys = {"data.tokenizer={type: bpe, path: " + file + "}",
                                         "data.allow_overlap=true"};
  const Outcome trained = t.train(keys);
  INFO(trained.err);
  REQUIRE(trained.code == 0);
  CHECK_THAT(trained.out,
             Catch::Contains("task task  accuracy") && Catch::Contains("sample \"the 3\" -> \""));
  const auto evaluation = nlohmann::json::parse(io::read_file(t.run + "/eval.jsonl"));
  CHECK(evaluation["tasks"]["task"]["questions"] == 1);
  CHECK(evaluation["samples"][0]["prompt"] == "the 3");

  // The run holds its tokenizer.
  const std::string original = io::read_file(file);
  std::filesystem::remove(file);
  CHECK(io::read_file(step_folder(t.run, 8) + "/tokenizer.json") == original);
  const Outcome generated = t.sluice({"generate", t.run, "-p", "the", "-n", "5", "--temperature", "0"});
  INFO(generated.err);
  CHECK(generated.code == 0);
  const Outcome exported = t.sluice({"checkpoint", "export", t.run, "-o", t.folder / "out"});
  INFO(exported.err);
  CHECK(exported.code == 0);
  CHECK(io::read_file(t.folder / "out/tokenizer.json") == original);

  const Outcome table = t.sluice({"eval", t.run, "--tasks", t.folder / "task.jsonl"});
  INFO(table.err);
  CHECK(table.code == 0);
  CHECK_THAT(table.out, Catch::Contains("by bytes") && Catch::Contains("task "));
  const Outcome json =
      t.sluice({"eval", t.run, "--tasks", t.folder / "task.jsonl", "--shots", "1", "--json"});
  REQUIRE(json.code == 0);
  CHECK(nlohmann::json::parse(json.out)["tasks"]["task"]["accuracy"] ==
        evaluation["tasks"]["task"]["accuracy"]);

  // What belongs to losses over token files is not passed over in silence.
  for (const std::vector<std::string>& options : {std::vector<std::string>{"--zero-first-value", "all"},
                                                  {"--max-tokens", "64"},
                                                  {"--per-token", "x.npy"}}) {
    std::vector<std::string> command{"eval", t.run, "--tasks", t.folder / "task.jsonl"};
    command.insert(command.end(), options.begin(), options.end());
    const Outcome refused = t.sluice(command);
    CHECK(refused.code == 64);
    CHECK_THAT(refused.err, Catch::Contains(options[0] + " has no effect on --tasks"));
  }

  const Outcome watched = t.sluice({"watch", "--once", t.run});
  CHECK(watched.code == 0);
  CHECK_THAT(watched.out,
             Catch::Contains("done") && Catch::Contains("8/8 100%") && Catch::Contains("held_out"));
  CHECK(t.sluice({"watch", t.folder / "nothing"}).code == 66);
}

TEST_CASE("tokens and texts one line at a time", "[tokenizer]") {
  TempFolder folder;
  const std::string tokenizer = SLUICE_SOURCE_DIR "/tests/golden/tokenizers/gpt2.json";
  write_bytes(folder / "texts.jsonl", "\"a<|endoftext|>\"\n\n{\"text\": \"a\"}\n");
  const auto run = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "tokenizer");
    return Program(folder.path, arguments).wait();
  };
  const Outcome encoded = run({"encode", folder / "texts.jsonl", "--tokenizer", tokenizer, "--special"});
  INFO(encoded.err);
  REQUIRE(encoded.code == 0);
  CHECK_THAT(encoded.out, Catch::EndsWith(",0]\n[66]\n") || Catch::EndsWith(",0]\n[67]\n"));
  write_bytes(folder / "ids.jsonl", encoded.out);
  CHECK(run({"decode", folder / "ids.jsonl", "--tokenizer", tokenizer}).out == "\"a\"\n\"a\"\n");
  write_bytes(folder / "ids.jsonl", "[1, 320]\n");
  const Outcome outside = run({"decode", folder / "ids.jsonl", "--tokenizer", tokenizer});
  CHECK(outside.code == 65);
  CHECK_THAT(outside.err, Catch::Contains("ids.jsonl:1") && Catch::Contains("from 0 to 319"));
}

}  // namespace sluice
