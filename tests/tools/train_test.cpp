// The program trains, stops, resumes and survives faults.
#include <algorithm>
#include <filesystem>
#include <sstream>

#include "tools/tiny_run.h"

namespace sluice {
namespace {

using Catch::Contains;
using test::Outcome;
using test::Program;
using test::TinyRun;

/// Only pid and times may differ between two runs.
std::vector<std::string> files_below(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    files.push_back(std::filesystem::relative(entry.path(), folder));
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

TEST_CASE("training creates the documented run folder", "[train]") {
  const TinyRun t;
  const Outcome outcome = t.train({"log.tensorboard=true", "eval.every_steps=4"});
  INFO(outcome.out << outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK(outcome.err.empty());
  CHECK(outcome.out.find('\r') == std::string::npos);
  CHECK_THAT(outcome.out, Contains("parameters") && Contains("activations") && Contains("8/8  100.0%") &&
                              Contains("val held_out") && Contains("bits/byte") && Contains("done "));
  for (const char* name :
       {"config.yaml", "config.input.yaml", "cmdline.txt", "run.json", "status.json", "metrics.jsonl",
        "eval.jsonl", "console.log", "tb", "ckpt/step_00000008/model.safetensors"})
    CHECK(io::exists(t.run + "/" + name));
  CHECK(test::status_of(t.run)["state"] == "done");
  CHECK(nlohmann::json::parse(io::read_file(t.run + "/run.json"))["parameters"].get<int64_t>() > 4000);
  const std::string evals = io::read_file(t.run + "/eval.jsonl");
  CHECK(std::count(evals.begin(), evals.end(), '\n') == 2);

  // The resolved configuration is a valid configuration and gives the same results from any folder.
  const Outcome again = t.sluice({"train", t.run + "/config.yaml", "--run-dir", t.folder / "again"});
  INFO(again.err);
  CHECK(again.code == 0);
  CHECK(t.curve(t.folder / "again") == t.curve(t.run));
  CHECK(t.bits(t.folder / "again", 8) == t.bits(t.run, 8));
}

TEST_CASE("a mixture of experts trains, reports its routers, resumes and is evaluated", "[train][moe]") {
  const TinyRun t;
  const std::vector<std::string> experts = {
      "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 12, "
      "shared_expert_intermediate_size: 8}",
      "log.tensorboard=true"};
  const Outcome outcome = t.train(experts);
  INFO(outcome.out << outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK_THAT(outcome.out,
             Contains("experts  2 of 4 x 12 + 8 shared  in 1 of 1 layers") && Contains("  load "));
  std::istringstream metrics(io::read_file(t.run + "/metrics.jsonl"));
  int64_t lines = 0;
  for (std::string line; std::getline(metrics, line); ++lines) {
    const auto router = nlohmann::json::parse(line).at("router");
    CHECK(router.at("layers").size() == 1);
    CHECK(router.at("balance_loss").get<double>() >= 0.9);
    CHECK(router.at("max_over_mean").get<double>() >= 1.0);
    CHECK(router.at("layers")[0].at("entropy").get<double>() <= 1.0);
  }
  CHECK(lines == 8);
  const auto state = nlohmann::json::parse(io::read_file(t.run + "/ckpt/step_00000008/state.json"));
  int64_t pairs = 0;
  for (const int64_t count : state.at("router").at("layers")[0].at("counts")) pairs += count;
  CHECK(pairs == 2 * 16 * 2);
  const auto run = nlohmann::json::parse(io::read_file(t.run + "/run.json"));
  CHECK(run.at("parameters").get<int64_t>() - run.at("parameters_active").get<int64_t>() == 2 * 3 * 12 * 16);

  // Stopped after four steps and continued.
  std::vector<std::string> half = experts;
  for (const char* more : {"train.max_steps=4", "--run-dir"}) half.push_back(more);
  half.push_back(t.folder / "half");
  REQUIRE(t.train(half).code == 0);
  std::vector<std::string> rest = experts;
  for (const std::string& more : {std::string("--run-dir"), t.folder / "half", std::string("--allow-change"),
                                  std::string("train.max_steps")})
    rest.push_back(more);
  const Outcome resumed = t.train(rest);
  INFO(resumed.out << resumed.err);
  CHECK(resumed.code == 0);

  CHECK(t.sluice({"eval", t.run}).code == 0);
  CHECK(t.sluice({"generate", t.run, "-p", "abc", "-n", "4"}).code == 0);
  // Weights of another number of experts are refused by name.
  std::vector<std::string> other = experts;
  other[0] = "model.moe={num_experts: 6, num_experts_per_tok: 2, moe_intermediate_size: 12}";
  for (const std::string& more :
       {std::string("--run-dir"), t.folder / "other", "train.init_from=" + t.run + "/ckpt/step_00000008"})
    other.push_back(more);
  const Outcome refused = t.train(other);
  CHECK(refused.code != 0);
  CHECK_THAT(refused.err, Contains("model.moe.num_experts = 6, but that of"));
}

TEST_CASE("starting a finished run reports this and changes nothing", "[train]") {
  const TinyRun t;
  REQUIRE(t.train().code == 0);
  const auto files = files_below(t.run);
  const std::string metrics = io::read_file(t.run + "/metrics.jsonl");
  const Outcome outcome = t.train();
  CHECK(outcome.code == 0);
  CHECK_THAT(outcome.out, Contains("is finished: step 8 of 8"));
  CHECK(files_below(t.run) == files);
  CHECK(io::read_file(t.run + "/metrics.jsonl") == metrics);
  // As left by a run that was killed between its last evaluation and its last status.
  test::write_bytes(t.run + "/status.json", R"({"state": "running", "step": 7, "loss": 3.5})");
  test::write_bytes(t.run + "/status.json.tmp", "{");
  CHECK(t.train().code == 0);
  const auto status = test::status_of(t.run);
  CHECK(status["state"] == "done");
  CHECK(status["step"] == 8);
  CHECK_FALSE(status.contains("loss"));
  CHECK_FALSE(io::exists(t.run + "/status.json.tmp"));
  // A key that does not exist is no consent, needed or not.
  const Outcome unknown = t.train({"--allow-change", "train.max_step"});
  CHECK(unknown.code == 64);
  CHECK_THAT(unknown.err,
             Contains("--allow-change train.max_step") && Contains("did you mean train.max_steps?"));
  // With consent the run can be made longer.
  const Outcome longer = t.train({"train.max_steps=10", "--allow-change", "train.max_steps"});
  INFO(longer.err);
  CHECK(longer.code == 0);
  CHECK(io::exists(t.run + "/ckpt/step_00000010"));
  // What was changed stays known, also when a later start changes nothing or something else.
  const auto changes = [&] { return nlohmann::json::parse(io::read_file(t.run + "/run.json"))["changes"]; };
  const nlohmann::json first = {{"step", 8}, {"key", "train.max_steps"}, {"before", "8"}, {"after", "10"}};
  CHECK(changes() == nlohmann::json::array({first}));
  REQUIRE(t.train({"train.max_steps=12", "optimizer.lr=1e-4", "--allow-change", "train.max_steps",
                   "--allow-change", "optimizer.lr"})
              .code == 0);
  CHECK(changes().size() == 3);
  CHECK(changes()[0] == first);
  CHECK(changes()[1]["step"] == 10);
  REQUIRE(t.train({"train.max_steps=12", "optimizer.lr=1e-4"}).code == 0);
  const auto state = nlohmann::json::parse(io::read_file(t.run + "/ckpt/step_00000012/state.json"));
  CHECK(state["changes"] == changes());
  CHECK(state["changes"].size() == 3);
}

TEST_CASE("a signal saves and exits with 75, and the same command resumes bit for bit", "[train]") {
  const int number = GENERATE(SIGUSR1, SIGUSR2, SIGTERM, SIGINT);
  const bool async = number == SIGUSR1;
  const TinyRun t;
  const std::vector<std::string> options = {"train.max_steps=250", "checkpoint.every_steps=0",
                                            fmt::format("checkpoint.async={}", async)};
  auto reference = options;
  reference.push_back("run_dir=" + t.folder / "straight");
  REQUIRE(t.train(reference).code == 0);

  int interruptions = 0;
  Outcome outcome;
  for (; interruptions < 3; ++interruptions) {
    Program program(t.folder.path, t.train_arguments(options));
    const auto lines = [&] {
      const std::string text =
          io::exists(t.run + "/metrics.jsonl") ? io::read_file(t.run + "/metrics.jsonl") : "";
      return std::count(text.begin(), text.end(), '\n');
    };
    // metrics.jsonl is opened after the signal handlers are installed.
    const auto before = lines();
    test::wait_until([&] { return lines() > before + 20 || lines() >= 250; });
    program.signal(number);
    outcome = program.wait();
    if (outcome.code == 0) break;
    INFO(outcome.out << outcome.err);
    REQUIRE(outcome.code == 75);
    CHECK_THAT(outcome.out, Contains("stopped by SIG"));
    CHECK(test::status_of(t.run)["state"] == "preempted");
  }
  CHECK(interruptions > 0);
  if (outcome.code != 0) outcome = t.train(options);
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 0);
  CHECK_THAT(outcome.out, Contains("resume   from"));
  CHECK(t.curve(t.run) == t.curve(t.folder / "straight"));
  CHECK(t.bits(t.run, 250) == t.bits(t.folder / "straight", 250));
}

TEST_CASE("after a kill at any I/O call, a run resumes to the same bits", "[train][crash]") {
  // All of them with SLUICE_CRASH_ALL=1; otherwise every seventeenth, a different set for torn writes.
  const int stride = std::getenv("SLUICE_CRASH_ALL") ? 1 : 17;
  const std::string torn = GENERATE("", ":torn");
  const TinyRun t;
  REQUIRE(t.train({"run_dir=" + t.folder / "straight"}).code == 0);
  const std::string bits = t.bits(t.folder / "straight", 8), curve = t.curve(t.folder / "straight");
  int crashes = 0;
  for (int n = torn.empty() ? 1 : 4;; n += stride) {
    std::filesystem::remove_all(t.run);
    const Outcome killed = t.train({}, {{"SLUICE_CRASH", std::to_string(n) + torn}});
    if (killed.code == 0) break;
    INFO("SLUICE_CRASH=" << n << torn << ": " << killed.err);
    REQUIRE(killed.code == 128 + SIGKILL);
    ++crashes;
    const Outcome resumed = t.train();
    INFO(resumed.out << resumed.err);
    REQUIRE(resumed.code == 0);
    CHECK(t.bits(t.run, 8) == bits);
    CHECK(t.curve(t.run) == curve);
    // Leftovers of the interrupted save are removed when training opens the folder; a finished run is only
    // read.
    if (resumed.out.find("is finished") != std::string::npos) continue;
    for (const std::string& name : io::list_directory(t.run + "/ckpt"))
      CHECK((name == "LATEST" || name.rfind("step_", 0) == 0));
  }
  CHECK(crashes > 5);
}

TEST_CASE("a disk that fills up at any I/O call causes one error and no loss", "[train][crash]") {
  const int stride = std::getenv("SLUICE_CRASH_ALL") ? 1 : 23;
  const TinyRun t;
  REQUIRE(t.train({"run_dir=" + t.folder / "straight"}).code == 0);
  const std::string bits = t.bits(t.folder / "straight", 8);
  int failures = 0;
  for (int n = 1;; n += stride) {
    std::filesystem::remove_all(t.run);
    const Outcome full = t.train({}, {{"SLUICE_IOFAIL", std::to_string(n) + ":ENOSPC:sticky"}});
    if (full.code == 0) {  // after the last checkpoint, of which only logs may be missing
      CHECK(t.bits(t.run, 8) == bits);
      if (full.err.find("No space left on device") == std::string::npos) break;  // n is beyond the last call
      continue;
    }
    INFO("SLUICE_IOFAIL=" << n << ": " << full.err);
    // 73 before the first step, 74 if the final checkpoint could not be written.
    REQUIRE((full.code == 73 || full.code == 74));
    CHECK_THAT(full.err, Contains("No space left on device"));
    ++failures;
    const Outcome resumed = t.train();
    INFO(resumed.out << resumed.err);
    REQUIRE(resumed.code == 0);
    CHECK(t.bits(t.run, 8) == bits);
  }
  CHECK(failures > 3);
}

TEST_CASE("one failed save is a warning, and training continues", "[train]") {
  const TinyRun t;
  const Outcome counted = t.train({"run_dir=" + t.folder / "straight"});
  REQUIRE(counted.code == 0);
  // Look for a call that belongs to the save at step 4.
  bool seen = false;
  for (int n = 20; n < 250 && !seen; n += 7) {
    std::filesystem::remove_all(t.run);
    const Outcome outcome = t.train({}, {{"SLUICE_IOFAIL", std::to_string(n) + ":EIO"}});
    if (outcome.code != 0 || outcome.err.find("warn") == std::string::npos) continue;
    if (io::exists(t.run + "/ckpt/step_00000004") || !io::exists(t.run + "/ckpt/step_00000008")) continue;
    seen = true;
    CHECK(t.bits(t.run, 8) == t.bits(t.folder / "straight", 8));
  }
  CHECK(seen);
}

TEST_CASE("a damaged newest checkpoint is skipped with a warning", "[train]") {
  const TinyRun t;
  REQUIRE(t.train().code == 0);
  const std::string bits = t.bits(t.run, 8);
  const std::string weights = t.run + "/ckpt/step_00000008/model.safetensors";
  std::string bytes = io::read_file(weights);
  bytes[bytes.size() - 100] = static_cast<char>(bytes[bytes.size() - 100] ^ 1);
  test::write_bytes(weights, bytes);
  const Outcome outcome = t.train();
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 0);
  CHECK_THAT(outcome.err, Contains("step_00000008"));
  CHECK_THAT(outcome.out, Contains("resume   from") && Contains("step 4"));
  CHECK(t.bits(t.run, 8) == bits);
}

TEST_CASE("an evaluation interrupted by a signal is repeated", "[train]") {
  const TinyRun t;
  REQUIRE(t.train().code == 0);
  const std::string evals = io::read_file(t.run + "/eval.jsonl");
  std::filesystem::remove(t.run + "/eval.jsonl");
  const Outcome outcome = t.train();
  INFO(outcome.err);
  CHECK(outcome.code == 0);
  CHECK(io::read_file(t.run + "/eval.jsonl") == evals);
}

TEST_CASE("training does not depend on its output being read", "[train]") {
  const TinyRun t;
  const std::string command = std::string(std::getenv("SLUICE_BINARY")) + " train " + t.config;
  CHECK(std::system((command + " > /dev/full").c_str()) == 0);
  CHECK(std::system((command + " run_dir=" + t.folder / "piped" + " | true").c_str()) == 0);
  CHECK(test::wait_until([&] { return io::exists(t.folder / "piped/ckpt/step_00000008/MANIFEST.json"); }));
  CHECK(t.bits(t.run, 8) == t.bits(t.folder / "piped", 8));
}

TEST_CASE("eval, analyze and generate read a run", "[train]") {
  const TinyRun t;
  REQUIRE(t.train().code == 0);
  const Outcome eval = t.sluice({"eval", t.run, "--json"});
  INFO(eval.err);
  REQUIRE(eval.code == 0);
  const auto result = nlohmann::json::parse(eval.out);
  const auto logged = nlohmann::json::parse(io::read_file(t.run + "/eval.jsonl"));
  CHECK(result["sets"] == logged["sets"]);
  CHECK(result["analysis"] == logged["analysis"]);
  const Outcome table = t.sluice({"eval", t.run + "/ckpt/step_00000004", "--set", "held_out"});
  CHECK(table.code == 0);
  CHECK_THAT(table.out, Contains("bits/byte") && Contains("held_out") && Contains("first token"));

  const auto zeroed = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"eval", t.run, "--json", "--zero-first-value"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome outcome = t.sluice(arguments);
    INFO(outcome.err);
    REQUIRE(outcome.code == 0);
    return nlohmann::json::parse(outcome.out);
  };
  CHECK(zeroed({"none"}) == result);
  const auto all = zeroed({"all"}), every = zeroed({"sinks", "--sink-threshold", "0"}),
             no = zeroed({"sinks"});
  CHECK(all["zero_first_value"] == "all");
  CHECK(all["sets"]["held_out"]["loss"] != result["sets"]["held_out"]["loss"]);
  CHECK(every["sets"] == all["sets"]);  // every head's attention is above zero
  CHECK(no["sink_threshold"] == 0.75);
  CHECK(no["sets"] == result["sets"]);  // eight steps do not create an attention sink
  const Outcome vain = t.sluice({"eval", t.run, "--zero-first-value", "all", "--sink-threshold", "0.5"});
  CHECK(vain.code == 64);
  CHECK_THAT(vain.err, Contains("--sink-threshold has no effect without --zero-first-value sinks"));

  const std::string folder = t.folder / "analysis";
  const std::vector<std::string> analyze = {"analyze",        t.run, "-o", folder, "--map-tokens", "8",
                                            "data.seq_len=12"};
  const Outcome analysis = t.sluice(analyze);
  INFO(analysis.err);
  REQUIRE(analysis.code == 0);
  CHECK_THAT(analysis.out, Contains("imbalance") && Contains("all ") && Contains(folder));
  const auto measured = nlohmann::json::parse(io::read_file(folder + "/analysis.json"));
  CHECK(measured["step"] == 8);
  CHECK(measured["layers"][0]["gates"][0]["histogram_50"].size() == 50);
  for (const auto& [name, file] : measured["arrays"].items())
    CHECK(io::read_file(folder + "/" + file.get<std::string>()).substr(1, 5) == "NUMPY");
  CHECK(t.sluice(analyze).code == 73);
  std::vector<std::string> again = analyze;
  again.insert(again.end(), {"--force", "--quiet"});
  CHECK((t.sluice(again).code == 0 && t.sluice(again).out.empty()));
  again.back() = "optimizer.lr=1";
  CHECK_THAT(t.sluice(again).err, Contains("optimizer.lr=1: has no effect on a trained model"));
  CHECK(nlohmann::json::parse(io::read_file(folder + "/analysis.json")) == measured);  // nothing was started

  const std::vector<std::string> generate = {"generate", t.run,    "-p", "abc",         "-n",
                                             "20",       "--seed", "3",  "--ignore-end"};
  const Outcome text = t.sluice(generate);
  INFO(text.err);
  CHECK(text.code == 0);
  CHECK(text.out.rfind("abc", 0) == 0);
  CHECK(t.sluice(generate).out == text.out);
}

TEST_CASE("eval, analyze and generate refuse overrides and options without effect", "[train]") {
  const TinyRun t;
  REQUIRE(t.train().code == 0);
  test::write_bytes(t.folder / "q.jsonl",
                    "{\"context\": \"a\", \"choices\": [\" b\", \" c\"], \"answer\": 0}\n");
  const auto refused = [&](std::vector<std::string> arguments, const std::string& part) {
    arguments.insert(arguments.begin() + 1, t.run);
    const Outcome o = t.sluice(arguments);
    INFO(fmt::format("{}", fmt::join(arguments, " ")) << o.out << o.err);
    CHECK(o.code == 64);
    CHECK_THAT(o.err, Contains(part));
    CHECK(test::count_of(o.err, "error:") == 1);
  };
  refused({"eval", "--shots", "2"}, "--shots has no effect without --tasks");
  refused({"eval", "--max-questions", "1"}, "--max-questions has no effect without --tasks");
  refused({"eval", "eval.max_tokens=64"}, "use sluice eval --max-tokens");
  refused({"eval", "eval.shots=3"}, "use sluice eval --shots");
  refused({"eval", "eval.tasks=[q.jsonl]"}, "use sluice eval --tasks");
  refused({"eval", "eval.prompts=[a]"}, "use sluice generate --prompt");
  refused({"eval", "eval={max_tokens: 64}"}, "eval={max_tokens: 64}: has no effect");
  refused({"eval", "train.seed=7"}, "train.seed=7: has no effect on a trained model here");
  refused({"eval", "train.global_batch_size=4"}, "train.global_batch_size=4: has no effect");
  refused({"eval", "data.train=[]"}, "use --data NAME=PREFIX");
  refused({"eval", "data.tokenizer.type=bpe"}, "use --tokenizer");
  refused({"eval", "model.initializer_range=1"}, "has no effect");
  refused({"eval", "name=other"}, "has no effect");
  refused({"eval", "eval.ruler.samples=1", "--tasks", t.folder / "q.jsonl"}, "has no effect");
  refused({"eval", "analysis.sink_threshold=0.5", "--tasks", t.folder / "q.jsonl"}, "has no effect");
  refused({"analyze", "-o", t.folder / "a", "train.micro_batch_size=1"}, "has no effect");
  refused({"generate", "analysis.sink_threshold=0.5"}, "has no effect");
  refused({"generate", "data.packing=documents"}, "has no effect");
  refused({"generate", "train.seed=7"}, "use sluice generate --seed");
  CHECK_FALSE(io::exists(t.folder / "a"));
  // What is read.
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{"train.micro_batch_size=4", "train.global_batch_size=4"},
        {"analysis.sink_threshold=0.5", "train.threads=1", "data.document_mask=true"},
        {"model.attention.kernel=auto", "train.precision=f64", "data.seq_len=8", "eval.ruler.samples=0"}}) {
    std::vector<std::string> arguments = {"eval", t.run};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Outcome o = t.sluice(arguments);
    INFO(o.err);
    CHECK(o.code == 0);
  }

  // Results are kept by name.
  io::make_directories(t.folder / "x");
  std::filesystem::copy_file(t.folder / "q.jsonl", t.folder / "x/q.jsonl");
  refused({"eval", "--tasks", t.folder / "q.jsonl", t.folder / "x/q.jsonl"}, "two tasks named q");
  refused({"eval", "--data", "v=" + t.folder / "held_out", "--data", "v=" + t.folder / "train"},
          "two sets named v");
  const Outcome training =
      t.train({"run_dir=" + t.folder / "other",
               "eval.tasks=[" + t.folder / "q.jsonl" + ", " + t.folder / "x/q.jsonl" + "]"});
  CHECK(training.code == 64);
  CHECK_THAT(training.err, Contains("two tasks named q"));
}

TEST_CASE("evaluations say how many tokens the checkpoint was trained on", "[train]") {
  const TinyRun t;
  REQUIRE(t.train().code == 0);
  const int64_t tokens = nlohmann::json::parse(io::read_file(t.run + "/eval.jsonl"))["tokens"];
  CHECK(tokens == 8 * 2 * 16);
  test::write_bytes(t.folder / "q.jsonl",
                    "{\"context\": \"a\", \"choices\": [\" b\", \" c\"], \"answer\": 0}\n");
  const auto said = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"eval", t.run, "--json", "data.seq_len=8"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return nlohmann::json::parse(t.sluice(arguments).out)["tokens"];
  };
  CHECK(said({}) == tokens);
  CHECK(said({"--tasks", t.folder / "q.jsonl"}) == tokens);
  REQUIRE(t.sluice({"analyze", t.run, "-o", t.folder / "a", "--quiet", "data.seq_len=8"}).code == 0);
  CHECK(nlohmann::json::parse(io::read_file(t.folder / "a/analysis.json"))["trained_tokens"] == tokens);
}

TEST_CASE("the table of eval has losses by position and needles", "[train]") {
  const TinyRun t;
  test::write_corpus(t.folder / "held_out", 2000, 257);
  REQUIRE(t.train({"model.max_position_embeddings=700"}).code == 0);
  const std::vector<std::string> longer = {"data.seq_len=640", "eval.ruler.samples=1",
                                           "eval.ruler.lengths=[640]", "eval.ruler.tasks=[niah_single_1]"};
  std::vector<std::string> arguments = {"eval", t.run};
  arguments.insert(arguments.end(), longer.begin(), longer.end());
  const Outcome table = t.sluice(arguments);
  INFO(table.out << table.err);
  REQUIRE(table.code == 0);
  CHECK_THAT(table.out, Contains("positions 0 to 64 ") && Contains("positions 64 to 128 "));
  CHECK_THAT(table.out, Contains("ruler niah_single_1 at 640:") && Contains("of 1 right"));
}

TEST_CASE("generate says what of a prompt the model does not see", "[train]") {
  const TinyRun t;
  REQUIRE(t.train().code == 0);
  const Outcome cut = t.sluice({"generate", t.run, "-p", std::string(20, 'a'), "-n", "1"});
  CHECK(cut.code == 0);
  CHECK_THAT(cut.err, Contains("the prompt has 20 tokens") && Contains("the first 4 are left out"));
  CHECK_THAT(t.sluice({"generate", t.run, "-p", std::string(16, 'a'), "-n", "1"}).err, !Contains("left out"));
}

TEST_CASE("a token that the tokenizer lacks ends a generated text", "[train]") {
  const TinyRun t;
  REQUIRE(t.train({"model.vocab_size=512", "train.max_steps=1"}).code == 0);
  for (const char* seed : {"1", "2", "3"}) {
    const Outcome o = t.sluice({"generate", t.run, "-n", "60", "--seed", seed});
    INFO(o.err);
    CHECK(o.code == 0);
  }
}

TEST_CASE("help is short, and every command has its own with examples", "[train]") {
  const TinyRun t;
  const Outcome help = t.sluice({"--help"});
  CHECK(help.code == 0);
  CHECK(std::count(help.out.begin(), help.out.end(), '\n') <= 27);
  for (const char* command : {"train", "plan", "config", "eval", "analyze", "generate", "tokenize",
                              "checkpoint", "bench", "doctor"}) {
    CHECK_THAT(help.out, Contains(std::string("sluice ") + command));
    const Outcome own = t.sluice({command, "--help"});
    INFO(command << own.err);
    CHECK(own.code == 0);
    CHECK_THAT(own.out, Contains("xample"));
  }
  CHECK_THAT(t.sluice({"doctor"}).out,
             Contains("AVX-512") && Contains("CUDA") && Contains("MPI") && Contains("GB/s"));
}

}  // namespace sluice
