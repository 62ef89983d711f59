// No training or evaluation is lost to signals, bad data, full disks, missing threads or memory, or moved
// folders.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "checkpoint/manifest.h"
#include "support/no_mpi.h"
#include "tools/tiny_run.h"

namespace sluice {
namespace {

using Catch::Contains;
using test::count_of;
using test::no_mpi;
using test::Outcome;
using test::Program;
using test::status_of;
using test::step_folder;
using test::TinyRun;

/// A run that pauses at `where` ("evaluate:4", "step:5") until it is released.
class Paused {
 public:
  Paused(const TinyRun& t, const std::string& where, const std::vector<std::string>& arguments, int ranks = 0)
      : file_(t.folder / "pause"),
        program_(t.folder.path, arguments, {{"SLUICE_PAUSE", "0:" + where + ":" + file_}}, ranks) {
    REQUIRE(test::wait_until([&] { return io::exists(file_ + ".0"); }));
  }
  void signal(int number) const { program_.signal(number); }
  Outcome go_on() {
    std::filesystem::remove(file_ + ".0");
    return program_.wait();
  }
  Outcome kill_now() {
    program_.signal(SIGKILL);
    std::filesystem::remove(file_ + ".0");
    return program_.wait();
  }

 private:
  std::string file_;
  Program program_;
};

/// Overwrites a token file in place, while a run uses it, with ids outside any vocabulary.
void spoil(const std::string& path) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const std::string bad(static_cast<size_t>(io::file_size(path)), '\xff');
  file.write(bad.data(), std::ssize(bad));
  REQUIRE(file.good());
}

/// Replaces state.json of a checkpoint, with valid checksums.
void replace_state(const std::string& folder, const nlohmann::json& state) {
  const std::string text = state.dump() + "\n";
  Manifest manifest = read_manifest(folder);
  for (FileRecord& file : manifest.files)
    if (file.name == "state.json") {
      file.bytes = std::ssize(text);
      file.xxh3_128 = checksum(text);
    }
  test::write_bytes(folder + "/state.json", text);
  test::write_bytes(folder + "/MANIFEST.json", manifest.text());
}

}  // namespace

TEST_CASE("an evaluation interrupted by a signal or a kill is repeated with the same weights",
          "[train][kept]") {
  const TinyRun t;
  const std::vector<std::string> options = {"eval.every_steps=2", "checkpoint.every_steps=4"};
  std::vector<std::string> straight = options;
  straight.push_back("run_dir=" + t.folder / "straight");
  REQUIRE(t.train(straight).code == 0);
  const std::string evals = io::read_file(t.folder / "straight/eval.jsonl");
  CHECK(count_of(evals, "\n") == 4);
  for (const char* where : {"evaluate:2", "evaluate:4", "evaluate:8"}) {
    INFO(where);
    std::filesystem::remove_all(t.run);
    Paused stopped(t, where, t.train_arguments(options));
    stopped.signal(SIGTERM);
    const Outcome outcome = stopped.go_on();
    INFO(outcome.out << outcome.err);
    CHECK(outcome.code == 75);
    CHECK(io::exists(step_folder(t.run, where[9] - '0')));  // no further step
    CHECK(t.train(options).code == 0);
    CHECK(io::read_file(t.run + "/eval.jsonl") == evals);
    CHECK(t.bits(t.run, 8) == t.bits(t.folder / "straight", 8));
  }
  std::filesystem::remove_all(t.run);
  CHECK(Paused(t, "evaluate:4", t.train_arguments(options)).kill_now().code == 128 + SIGKILL);
  const Outcome resumed = t.train(options);
  CHECK_THAT(resumed.out, Contains("(step 4)"));  // saved before it was evaluated
  CHECK(io::read_file(t.run + "/eval.jsonl") == evals);
}

TEST_CASE("ranks repeat an interrupted evaluation, computed by one or by all of them", "[ranks][kept]") {
  if (no_mpi()) return;
  const TinyRun t;
  const std::string stage = GENERATE("0", "3");
  INFO("ZeRO " << stage);
  const std::vector<std::string> options = {"eval.every_steps=2", "train.micro_batch_size=1",
                                            "parallel.zero_stage=" + stage};
  const auto arguments = [&](const std::string& run) {
    std::vector<std::string> all = t.train_arguments(options);
    all.push_back("run_dir=" + run);
    return all;
  };
  REQUIRE(Program(t.folder.path, arguments(t.folder / "straight"), {}, 2).wait().code == 0);
  Paused stopped(t, "evaluate:2", arguments(t.run), 2);
  // To the rank itself: mpirun forwards signals later, on a busy machine perhaps after the pause.
  kill(status_of(t.run).at("pid").get<pid_t>(), SIGUSR1);
  const Outcome outcome = stopped.go_on();
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 75);
  CHECK(io::exists(step_folder(t.run, 2)));
  CHECK(Program(t.folder.path, arguments(t.run), {}, 2).wait().code == 0);
  CHECK(io::read_file(t.run + "/eval.jsonl") == io::read_file(t.folder / "straight/eval.jsonl"));
}

TEST_CASE("a failed evaluation loses no training, and the next start only evaluates", "[train][kept]") {
  const TinyRun t;
  const std::vector<std::string> options = {"checkpoint.every_steps=0"};
  REQUIRE(t.train({"checkpoint.every_steps=0", "run_dir=" + t.folder / "straight"}).code == 0);
  const std::string held_out = io::read_file(t.folder / "held_out.bin");
  Paused paused(t, "evaluate:8", t.train_arguments(options));
  spoil(t.folder / "held_out.bin");
  const Outcome outcome = paused.go_on();
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 65);
  CHECK_THAT(outcome.err, Contains("evaluation at step 8: ") &&
                              Contains("trained up to step 8, saved up to step 8 in") &&
                              Contains("step_00000008"));
  CHECK(status_of(t.run)["state"] == "failed");
  CHECK(status_of(t.run)["exit_code"] == 65);
  test::write_bytes(t.folder / "held_out.bin", held_out);
  const std::string metrics = io::read_file(t.run + "/metrics.jsonl");
  const Outcome again = t.train(options);
  INFO(again.out << again.err);
  CHECK(again.code == 0);
  CHECK(io::read_file(t.run + "/metrics.jsonl") == metrics);
  CHECK(io::read_file(t.run + "/eval.jsonl") == io::read_file(t.folder / "straight/eval.jsonl"));
}

TEST_CASE("a resumed run's status knows the last loss and what is saved", "[train][kept]") {
  const TinyRun t;
  const Outcome first = t.train();
  INFO(first.out << first.err);
  REQUIRE(first.code == 0);
  CHECK_THAT(first.out, Contains("done     8 steps in "));
  const double loss = status_of(t.run)["loss"];
  const std::string shown = fmt::format("  loss {:.3f}  ", loss);
  CHECK_THAT(first.out, Contains(shown));
  // Nothing is left to train, but the last evaluation is made again.
  REQUIRE(io::exists(t.run + "/eval.jsonl"));
  std::filesystem::remove(t.run + "/eval.jsonl");
  const Outcome evaluated = t.train();
  INFO(evaluated.out << evaluated.err);
  REQUIRE(evaluated.code == 0);
  CHECK_THAT(evaluated.out, Contains("done     8 steps" + shown));
  const auto status = status_of(t.run);
  CHECK(status["state"] == "done");
  CHECK(status["loss"] == loss);
  CHECK(status["saved_step"] == 8);
  CHECK(status["seconds_left"] == 0);
  // Before the first step of a start, the time left is not known.
  const std::vector<std::string> more = {"train.max_steps=12", "--allow-change", "train.max_steps"};
  Paused paused(t, "step:8", t.train_arguments(more));
  const auto running = status_of(t.run);
  CHECK(running["loss"] == loss);
  CHECK(running["saved_step"] == 8);
  CHECK_FALSE(running.contains("seconds_left"));
  paused.kill_now();
  const Outcome longer = t.train(more);
  INFO(longer.out << longer.err);
  REQUIRE(longer.code == 0);
  CHECK_THAT(longer.out, Contains("done     12 steps, the last 4 in "));
}

TEST_CASE("bad training data leaves a checkpoint of the last good step, on one rank and on several",
          "[train][kept]") {
  const int ranks = GENERATE(0, 2);
  if (ranks > 0 && no_mpi()) return;
  const TinyRun t;
  const std::vector<std::string> options = {"checkpoint.every_steps=0", "train.micro_batch_size=1"};
  REQUIRE(
      t.train({"checkpoint.every_steps=5", "train.micro_batch_size=1", "run_dir=" + t.folder / "straight"})
          .code == 0);
  Paused paused(t, "step:5", t.train_arguments(options), ranks);
  spoil(t.folder / "train.bin");
  const Outcome outcome = paused.go_on();
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 65);
  CHECK_THAT(outcome.err, Contains("saved up to step"));
  CHECK(status_of(t.run)["saved_step"] == 5);
  const std::string weights = "/model.safetensors";
  if (ranks == 0)
    CHECK((io::read_file(step_folder(t.run, 5) + weights) ==
           io::read_file(step_folder(t.folder / "straight", 5) + weights)));
}

TEST_CASE("running out of memory leaves a checkpoint, a status and memory figures", "[train][kept]") {
  const TinyRun t;
  const Outcome outcome = t.train({"checkpoint.every_steps=0"}, {{"SLUICE_NOMEMORY", "0:5"}});
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 71);
  CHECK_THAT(outcome.err, Contains("out of memory: the process holds ") && Contains("MiB") &&
                              Contains("saved up to step 5"));
  CHECK(status_of(t.run)["state"] == "failed");
  CHECK(status_of(t.run)["exit_code"] == 71);
  CHECK(t.train().code == 0);
  CHECK(t.train({"run_dir=" + t.folder / "straight"}).code == 0);
  CHECK(t.bits(t.run, 8) == t.bits(t.folder / "straight", 8));
}

TEST_CASE("a numeric stop keeps the weights before the step", "[train][kept]") {
  const TinyRun t;
  const Outcome exploded = t.train({"train.on_spike=stop", "train.max_steps=30", "optimizer.lr=3",
                                    "checkpoint.every_steps=0", "train.max_grad_norm=0"});
  INFO(exploded.out << exploded.err);
  REQUIRE(exploded.code == 78);
  const auto step = status_of(t.run)["step"].get<int64_t>();
  CHECK(step >= 1);
  CHECK(io::exists(step_folder(t.run, step)));
  CHECK_THAT(exploded.err, Contains("a spike") && Contains(fmt::format("saved up to step {}", step)));
}

TEST_CASE("files other than checkpoints that cannot be written never end training", "[train][kept]") {
  const TinyRun t;
  const std::vector<std::string> options = {"log.trace_step=3", "log.tensorboard=true", "log.bits=1",
                                            "eval.every_steps=4"};
  std::vector<std::string> straight = options;
  straight.push_back("run_dir=" + t.folder / "straight");
  REQUIRE(t.train(straight, {{"SLUICE_IOTRACE", t.folder / "trace"}}).code == 0);
  // Operations on files other than checkpoints' after the first step's line: which of them, by number.
  std::istringstream trace(io::read_file(t.folder / "trace"));
  std::vector<std::pair<std::string, std::string>> operations;
  bool training = false;
  for (std::string line; std::getline(trace, line);) {
    std::istringstream words(line);
    std::string rank, number, path = line.substr(line.rfind(' ') + 1);
    words >> rank >> number;
    training |= path.ends_with("metrics.jsonl") && line.find(" write ") != std::string::npos;
    if (training && path.find("/ckpt/") == std::string::npos && !path.ends_with("/ckpt"))
      operations.emplace_back(number, line);
  }
  REQUIRE(operations.size() > 20);
  bool traced = false;
  for (size_t i = 0; i < operations.size(); ++i) {
    const bool is_trace = operations[i].second.find("trace.json") != std::string::npos;
    if (i % 7 != 0 && (!is_trace || traced)) continue;
    traced |= is_trace;
    std::filesystem::remove_all(t.run);
    const Outcome outcome = t.train(options, {{"SLUICE_IOFAIL", operations[i].first + ":ENOSPC"}});
    INFO(operations[i].second << "\n" << outcome.out << outcome.err);
    CHECK(outcome.code == 0);
    CHECK_THAT(outcome.err, Contains("No space left on device"));
    CHECK(t.bits(t.run, 8) == t.bits(t.folder / "straight", 8));
  }
  CHECK(traced);
}

TEST_CASE("training continues if no thread can be started", "[train][kept]") {
  const TinyRun t;
  const int ranks = GENERATE(0, 2);
  if (ranks > 0 && no_mpi()) return;
  const std::vector<std::string> options = {"checkpoint.async=true", "checkpoint.every_steps=2",
                                            "train.micro_batch_size=1"};
  const auto arguments = [&](const std::string& run) {
    std::vector<std::string> all = t.train_arguments(options);
    all.push_back("run_dir=" + run);
    return all;
  };
  REQUIRE(Program(t.folder.path, arguments(t.folder / "straight"), {}, ranks).wait().code == 0);
  const Outcome outcome =
      Program(t.folder.path, arguments(t.run), {{"SLUICE_THREADFAIL", "1:sticky"}}, ranks).wait();
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 0);
  CHECK_THAT(outcome.err, Contains("cannot start a thread") &&
                              Contains("training waits while they are written (reported once)"));
  if (ranks > 0)
    CHECK_THAT(outcome.err, Contains("the watchdog cannot start a thread") &&
                                Contains("communication: cannot start a thread"));
  const Outcome diff =
      t.sluice({"checkpoint", "diff", step_folder(t.run, 8), step_folder(t.folder / "straight", 8)});
  CHECK_THAT(diff.out, Contains("equal bit for bit"));
  CHECK(io::exists(step_folder(t.run, 6)));
}

TEST_CASE("a renamed run folder is not confused with the one that takes its place", "[train][kept]") {
  const TinyRun t;
  const std::string moved = t.folder / "moved";
  Paused first(t, "step:5", t.train_arguments());
  std::filesystem::rename(t.run, moved);
  const bool replaced = GENERATE(true, false);
  if (replaced) REQUIRE(t.train({"train.seed=8", "checkpoint.every_steps=3"}).code == 0);
  const auto there = replaced ? io::list_directory(t.run + "/ckpt") : std::vector<std::string>();
  const Outcome outcome = first.go_on();
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 73);
  CHECK_THAT(outcome.err, Contains("is no longer the folder of this run, which was renamed to " + moved) &&
                              Contains("saved up to step 8 in " + moved));
  CHECK((outcome.err.find("another run has taken its place") != std::string::npos) == replaced);
  CHECK(io::exists(step_folder(moved, 8)));
  if (replaced)
    CHECK(io::list_directory(t.run + "/ckpt") == there);
  else
    CHECK_FALSE(io::exists(t.run));
}

TEST_CASE("folders removed during training are created again", "[train][kept]") {
  const TinyRun t;
  const std::string what = GENERATE("/ckpt", "");
  Paused paused(t, "step:5", t.train_arguments());
  std::filesystem::remove_all(t.run + what);
  const Outcome outcome = paused.go_on();
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 0);
  CHECK(io::exists(step_folder(t.run, 8)));
  if (what.empty())
    CHECK_THAT(outcome.err, Contains("was removed while it was trained in, and has been made again"));
}

TEST_CASE("repeated failures are reported at growing intervals, with their count", "[train][kept]") {
  const TinyRun t;
  Paused paused(t, "step:1", t.train_arguments({"checkpoint.every_steps=1", "train.max_steps=40"}));
  std::filesystem::remove_all(t.run + "/ckpt");
  test::write_bytes(t.run + "/ckpt", "a file");
  const Outcome outcome = paused.go_on();
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 74);
  CHECK(count_of(outcome.err, "the next save tries again") == 6);  // the 1st, 2nd, 4th, 8th, 16th, 32nd
  CHECK_THAT(outcome.err, Contains("failure 16 in a row"));
}

TEST_CASE("divergence is reported, and spikes are detected from the first steps on", "[train][kept]") {
  const TinyRun t;
  const Outcome outcome = t.train({"optimizer.lr=3", "train.max_steps=40", "train.max_grad_norm=0"});
  INFO(outcome.out << outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK_THAT(outcome.out, Contains("done, but the loss diverged (the smoothed loss is"));
  CHECK(count_of(outcome.err, "the training has diverged") == 1);
  CHECK(status_of(t.run)["diverged"]["since_step"].get<int64_t>() >= 2);
  const std::string metrics = io::read_file(t.run + "/metrics.jsonl");
  CHECK(count_of(metrics, "diverged_since") > 10);
  CHECK(metrics.find("\"spikes\":0,\"skipped\":0,\"diverged_since\"") == std::string::npos);

  const Outcome healthy = t.train({"run_dir=" + t.folder / "healthy", "train.max_steps=40"});
  CHECK(healthy.err.empty());
  CHECK_THAT(healthy.out, !Contains("diverged"));
}

TEST_CASE("a signal before the first step does not report a save", "[train][kept]") {
  const TinyRun t;
  Paused paused(t, "init:0", t.train_arguments());
  paused.signal(SIGTERM);
  const Outcome outcome = paused.go_on();
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 75);
  CHECK_THAT(outcome.out, Contains("stopped by SIGTERM before the first step: there was nothing to save"));
  CHECK_THAT(outcome.out, !Contains("saved;"));
}

TEST_CASE("impossible fields of state.json are an error that names them", "[train][kept]") {
  const TinyRun t;
  REQUIRE(t.train({"train.max_steps=4"}).code == 0);
  const std::string folder = step_folder(t.run, 4);
  const auto good = nlohmann::json::parse(io::read_file(folder + "/state.json"));
  const std::vector<std::pair<std::string, nlohmann::json>> crafts = {
      {"/policy/skipped", -5},
      {"/policy/skipped", int64_t{9223372036854775807}},
      {"/policy/losses", {1, nullptr}},
      {"/policy/recently_skipped_steps", {7}},
      {"/step", -7},
      {"/step", 2},
      {"/step", int64_t{1} << 62},
      {"/step", "4"},
      {"/adam_steps", 9},
      {"/data_fingerprint", 5},
      {"/seconds", "x"},
      {"/tokenizer_fingerprint", {1}},
      {"/divergence", 1},
      {"/divergence/count", -1},
      {"/tokens", 0.5}};
  for (const auto& [path, value] : crafts) {
    nlohmann::json state = good;
    state[nlohmann::json::json_pointer(path)] = value;
    replace_state(folder, state);
    const Outcome outcome = t.train({"train.max_steps=8", "--allow-change", "train.max_steps"});
    INFO(path << " = " << value.dump() << "\n" << outcome.err);
    CHECK(outcome.code == 65);
    CHECK_THAT(outcome.err, Contains("state.json: ") && Contains(path.substr(path.rfind('/') + 1)));
  }
  replace_state(folder, good);
  CHECK(t.train({"train.max_steps=8", "--allow-change", "train.max_steps"}).code == 0);
  // As in checkpoints of older versions, without newer fields.
  REQUIRE(t.train({"train.max_steps=4", "run_dir=" + t.folder / "old"}).code == 0);
  nlohmann::json old = good;
  old.erase("divergence");
  replace_state(step_folder(t.folder / "old", 4), old);
  CHECK(t.train({"train.max_steps=8", "--allow-change", "train.max_steps", "run_dir=" + t.folder / "old"})
            .code == 0);
}

}  // namespace sluice
