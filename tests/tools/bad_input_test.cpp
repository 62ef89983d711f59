// Bad inputs: one clear message, the documented exit code, nothing lost.
#include <algorithm>
#include <filesystem>

#include "tools/tiny_run.h"

namespace sluice {
namespace {

using test::Outcome;
using test::TinyRun;

/// Names and contents of everything below a folder except the lock.
std::string contents(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    if (entry.is_regular_file() && entry.path().filename() != "lock")
      files.push_back(entry.path().string() + "\n" + io::read_file(entry.path()));
  std::sort(files.begin(), files.end());
  std::string all;
  for (const std::string& file : files) all += file;
  return all;
}

void expect(const Outcome& outcome, int code, const std::vector<std::string>& parts) {
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == code);
  // One message, once.
  size_t errors = 0;
  for (size_t at = outcome.err.find("error: "); at != std::string::npos;
       at = outcome.err.find("error: ", at + 1))
    errors += at == 0 || outcome.err[at - 1] == '\n';
  CHECK(errors == 1);
  for (const std::string& part : parts) CHECK_THAT(outcome.err, Catch::Contains(part));
}

}  // namespace

TEST_CASE("bad configurations are refused before anything is written", "[bad_input]") {
  const TinyRun t;
  struct Case {
    const char* more;  // additional lines of the configuration
    std::vector<std::string> overrides;
    int code;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases = {
      {"eval: {every_step: 3}\n", {}, 64, {"tiny.yaml:19:", "every_step", "every_steps"}},
      {"eval: {every_steps: often}\n", {}, 64, {"tiny.yaml:19:", "every_steps", "integer"}},
      {"name: twice\n", {}, 64, {"tiny.yaml:19:", "name", "twice"}},
      {"", {"model.num_attention_heads=3", "model.num_key_value_heads=2"}, 64, {"num_key_value_heads"}},
      {"", {"model.head_dim=7"}, 64, {"head_dim"}},
      {"", {"model.hidden_sise=3"}, 64, {"hidden_sise", "hidden_size"}},
      {"", {"nonsense"}, 64, {"nonsense"}},
      {"", {"train.global_batch_size=3"}, 64, {"global_batch_size"}},
      {"", {"train.max_steps=0"}, 64, {"max_steps"}},
      {"", {"train.device=cuda"}, 64, {"cuda"}},
      {"", {"optimizer.lr=-1"}, 64, {"optimizer.lr"}},
      {"", {"data.train=[]"}, 64, {"data.train"}},
      {"", {"model.vocab_size=100"}, 64, {"vocab_size", "257"}},
      {"", {"data.train=[{name: a, path: nowhere}]"}, 66, {"nowhere"}},
      {"", {"data.validation=[{name: a, path: nowhere}]"}, 66, {"nowhere"}},
      {"", {"data.seq_len=100000"}, 65, {"seq_len"}},
      {"", {"data.tokenizer={type: sentencepiece, path: nothing.model}"}, 66, {"nothing.model"}},
      {"", {"train.init_from=" + t.folder / "no_weights"}, 66, {"no_weights"}},
      {"", {"train.init_from=" + t.config}, 64, {"init_from", "is a configuration, which holds no weights"}},
      {"", {"train.seed="}, 64, {"train.seed=null"}},
      {"parallel: {tensor: 2}\n", {}, 64, {"parallel", "not available"}},
  };
  for (const Case& c : cases) {
    t.write_config(c.more);
    INFO(c.more << (c.overrides.empty() ? "" : c.overrides[0]));
    expect(t.train(c.overrides), c.code, c.parts);
    CHECK_FALSE(io::exists(t.run + "/metrics.jsonl"));
    CHECK_FALSE(io::exists(t.run + "/ckpt"));
  }
}

TEST_CASE("bad command lines are refused", "[bad_input]") {
  const TinyRun t;
  expect(t.sluice({"trian", t.config}), 64, {"unknown command", "trian"});
  for (const std::string command : {"checkpoint", "synthesize", "config", "tokenizer"}) {
    expect(
        t.sluice({command, "verfiy", "A"}), 64,
        {command == "checkpoint" ? "unknown command verfiy; did you mean verify?" : "unknown command verfiy",
         "see sluice " + command + " --help"});
    expect(t.sluice({command, "--verfiy"}), 64, {"unknown option --verfiy"});
    expect(t.sluice({command}), 64, {"A subcommand is required (see sluice " + command + " --help)"});
    CHECK_THAT(t.sluice({command, "--help"}).out,
               Catch::Contains("Usage: ") && Catch::Contains("[OPTIONS] SUBCOMMAND"));
  }
  expect(t.sluice({"synthesize", "bigram"}), 64, {"unknown command bigram; commands: ", "bigram-backcopy"});
  expect(t.sluice({"checkpoint", "prune", t.run}), 64,
         {"--keep-last is required (see sluice checkpoint prune --help)"});
  expect(t.train({"--run-dir", t.folder / "a", "run_dir=" + (t.folder / "b")}), 64, {"two run folders"});
  CHECK_FALSE(io::exists(t.folder / "a"));
  expect(t.sluice({"train"}), 64, {"config"});
  expect(t.sluice({"train", t.config, "--no-such-option"}), 64, {"--no-such-option"});
  expect(t.sluice({"train", t.folder / "missing.yaml"}), 66, {"missing.yaml"});
  expect(t.sluice({"generate", t.folder / "nowhere"}), 66, {"nowhere"});
  io::make_directories(t.folder / "empty");
  expect(t.sluice({"generate", t.folder / "empty"}), 66, {"contains no checkpoint"});
  expect(t.sluice({"eval", t.folder / "empty"}), 66, {"contains no checkpoint"});
}

TEST_CASE("bad data is refused with file and place", "[bad_input]") {
  const TinyRun t;
  SECTION("a truncated index") {
    const std::string path = t.folder / "train.idx";
    const std::string bytes = io::read_file(path);
    test::write_bytes(path, bytes.substr(0, bytes.size() / 2));
    expect(t.train(), 65, {"train.idx"});
  }
  SECTION("a truncated token file") {
    const std::string path = t.folder / "train.bin";
    const std::string bytes = io::read_file(path);
    test::write_bytes(path, bytes.substr(0, bytes.size() - 1));
    expect(t.train(), 65, {"train.bin"});
  }
  SECTION("a token beyond the vocabulary") {
    std::vector<int32_t> tokens(5000, 300);
    test::write_tokens(t.folder / "foreign", {tokens}, 1000);
    expect(t.train({"data.train=[{name: a, path: " + t.folder / "foreign" + "}]"}), 65,
           {"foreign", "300", "257"});
  }
  SECTION("something else entirely") {
    test::write_bytes(t.folder / "train.idx", std::string(1000, 'x'));
    expect(t.train(), 65, {"train.idx"});
  }
}

TEST_CASE("folders that cannot be written are refused", "[bad_input]") {
  const TinyRun t;
  expect(t.train({"run_dir=" + t.config + "/run"}), 73, {"tiny.yaml"});
  expect(t.train({"run_dir=/proc/run"}), 73, {"/proc/run"});
}

TEST_CASE("two runs cannot use one folder", "[bad_input]") {
  const TinyRun t;
  const std::vector<std::string> endless = {"train.max_steps=1000000", "checkpoint.every_steps=0"};
  test::Program first(t.folder.path, t.train_arguments(endless));
  REQUIRE(test::wait_until(
      [&] { return io::exists(t.run + "/metrics.jsonl") && io::file_size(t.run + "/metrics.jsonl") > 0; }));
  io::make_directories(t.folder / "other");
  const Outcome second = test::Program(t.folder / "other", t.train_arguments(endless)).wait();
  expect(second, 73, {"in use", "pid "});
  first.signal(SIGTERM);
  CHECK(first.wait().code == 75);
}

TEST_CASE("a run is not resumed with another configuration, data or tokenizer, and stays unchanged",
          "[bad_input]") {
  const TinyRun t;
  REQUIRE(t.train().code == 0);
  const std::string before = contents(t.run);
  expect(t.train({"model.hidden_size=32"}), 64,
         {"cannot resume", "impossible", "model.hidden_size: 16 -> 32"});
  expect(t.train({"train.seed=9"}), 64, {"train.seed: 1234 -> 9"});
  expect(t.train({"optimizer.lr=3e-4"}), 64, {"--allow-change", "optimizer.lr"});
  expect(t.train({"optimizer.lr=3e-4", "--allow-change", "optimizer.min_lr"}), 64, {"optimizer.lr"});
  expect(t.train({"--fresh"}), 64, {"--fresh", "holds a training"});
  expect(t.train({"run_dir=" + t.folder / "other", "model.hidden_size=32",
                  "train.init_from=" + t.run + "/ckpt/step_00000008"}),
         64, {"model.hidden_size = 32, but that of", "config.yaml is 16"});
  expect(t.sluice({"eval", t.run, "--set", "nothing"}), 64, {"nothing", "held_out"});
  expect(t.sluice({"eval", t.run, "--data", "x"}), 64, {"NAME=PREFIX"});
  CHECK(contents(t.run) == before);

  // The same path, other tokens.
  test::write_corpus(t.folder / "train_new", 6000, 257);
  for (const char* extension : {".bin", ".idx"})
    std::filesystem::rename(t.folder / "train_new" + extension, t.folder / "train" + extension);
  expect(t.train(), 64, {"impossible", "fingerprint"});
  CHECK(contents(t.run) == before);
}

TEST_CASE("if all checkpoints are damaged, training does not silently start from scratch", "[bad_input]") {
  const TinyRun t;
  REQUIRE(t.train({"checkpoint.every_steps=0"}).code == 0);
  const std::string weights = t.run + "/ckpt/step_00000008/model.safetensors";
  const std::string bytes = io::read_file(weights);
  for (const size_t size : {bytes.size() - 1, bytes.size() / 2, size_t{0}}) {
    test::write_bytes(weights, bytes.substr(0, size));
    const std::string before = contents(t.run);
    expect(t.train({"checkpoint.every_steps=0"}), 65, {"no valid checkpoint"});
    expect(t.sluice({"generate", t.run}), 65, {"no valid checkpoint"});
    expect(t.sluice({"eval", t.run + "/ckpt/step_00000008"}), 65, {"model.safetensors"});
    CHECK(contents(t.run) == before);
  }
}

TEST_CASE("a run that diverges to non-finite values stops with 78 and keeps its checkpoints", "[bad_input]") {
  const TinyRun t;
  REQUIRE(t.train().code == 0);
  const Outcome outcome = t.train({"train.max_steps=40", "optimizer.lr=1e30", "--allow-change",
                                   "optimizer.lr", "--allow-change", "train.max_steps"});
  expect(outcome, 78, {"not finite; first in", "more than 10 of the last 1000"});
  CHECK(test::status_of(t.run)["exit_code"] == 78);
  CHECK(io::exists(t.run + "/ckpt/step_00000008/MANIFEST.json"));
}

}  // namespace sluice
