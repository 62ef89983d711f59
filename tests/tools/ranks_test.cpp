// Training under mpirun: stopped, killed and resumed with another number of ranks.
#include <atomic>
#include <filesystem>
#include <sstream>

#include "core/device.h"
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

std::vector<std::string> arguments(const TinyRun& t, const std::string& folder,
                                   const std::vector<std::string>& more = {}) {
  std::vector<std::string> all = {
      "train",
      t.config,
      "--run-dir",
      folder,
      "train.micro_batch_size=1",
      "train.global_batch_size=8",
      "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8, "
      "load_balance: {scope: micro_batch}}",
      "parallel.determinism=exact"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

Outcome train(const TinyRun& t, int ranks, const std::string& folder,
              const std::vector<std::string>& more = {}) {
  return Program(t.folder.path, arguments(t, folder, more), {}, ranks).wait();
}

/// Checks that two checkpoints of a step are bitwise equal, independently of their files.
void check_same(const TinyRun& t, const std::string& a, const std::string& b, int64_t step) {
  const Outcome diff = t.sluice({"checkpoint", "diff", step_folder(a, step), step_folder(b, step)});
  INFO(diff.out << diff.err);
  CHECK(diff.code == 0);
  CHECK_THAT(diff.out, Contains("equal bit for bit"));
}

}  // namespace

TEST_CASE("one, two and four ranks train the same model bit for bit, and analyses on one and two ranks agree",
          "[ranks]") {
  if (no_mpi()) return;
  const TinyRun t;
  for (const int ranks : {1, 2, 4}) {
    const Outcome outcome = train(t, ranks, t.folder / std::to_string(ranks));
    INFO(ranks << " ranks\n" << outcome.out << outcome.err);
    REQUIRE(outcome.code == 0);
    if (ranks > 1) CHECK_THAT(outcome.out, Contains(fmt::format("ranks    {} (mpi)", ranks)));
    // Reported once, not by every rank.
    CHECK(outcome.out.find("8/8") == outcome.out.rfind("8/8"));
    check_same(t, t.folder / std::to_string(ranks), t.folder / "1", 8);
    CHECK(t.curve(t.folder / std::to_string(ranks)) == t.curve(t.folder / "1"));
  }
  for (const int ranks : {0, 2}) {
    const Outcome outcome =
        Program(t.folder.path, {"analyze", t.folder / "2", "-o", t.folder / fmt::format("a{}", ranks)}, {},
                ranks)
            .wait();
    INFO(ranks << " ranks\n" << outcome.out << outcome.err);
    REQUIRE(outcome.code == 0);
  }
  for (const char* file : {"analysis.json", "value_norms.npy", "attention_mean.npy", "query_pca.npy"})
    CHECK(io::read_file(t.folder / "a0/" + file) == io::read_file(t.folder / "a2/" + file));
}

TEST_CASE("context parallelism under mpirun: the bits of one rank, and analyses that share samples",
          "[ranks][context]") {
  if (no_mpi()) return;
  const TinyRun t;
  const auto trained = [&](int ranks, const std::string& context) {
    const std::string run = t.folder / fmt::format("{}_{}", ranks, context);
    const Outcome o = train(t, ranks, run, {"parallel.context=" + context});
    INFO(ranks << " ranks\n" << o.out << o.err);
    REQUIRE(o.code == 0);
    return run;
  };
  const std::string one = trained(0, "1");
  for (const std::string& run : {trained(2, "2"), trained(4, "2"), trained(4, "4")})
    check_same(t, run, one, 8);

  const auto analysed = [&](int ranks, const std::string& context) {
    return Program(
               t.folder.path,
               {"analyze", one, "-o", t.folder / fmt::format("a{}", ranks), "parallel.context=" + context},
               {}, ranks)
        .wait();
  };
  for (const auto& [ranks, context] : {std::pair(0, "1"), std::pair(2, "2"), std::pair(4, "2")}) {
    const Outcome o = analysed(ranks, context);
    INFO(ranks << " ranks\n" << o.out << o.err);
    REQUIRE(o.code == 0);
    const auto read = [&](int of) {
      return nlohmann::json::parse(io::read_file(t.folder / fmt::format("a{}/analysis.json", of)));
    };
    const nlohmann::json a = read(ranks), b = read(0);
    CHECK(a["sequences"] == b["sequences"]);
    // Or within an f32's rounding of a head's importance of a half, of which imbalance is a small difference.
    for (const char* name : {"first_token_attention", "mean_gate_score", "imbalance"})
      CHECK(a["total"][name].get<double>() ==
            Approx(b["total"][name].get<double>()).epsilon(1e-6).margin(3e-8));
  }
  for (const int ranks : {0, 3}) {
    const Outcome o = analysed(ranks, "2");
    INFO(o.err);
    CHECK(o.code == 64);
    CHECK_THAT(o.err,
               Contains(fmt::format("parallel.context = 2: {} cannot be divided into groups of that size",
                                    ranks == 0 ? "1 rank" : "3 ranks")));
    CHECK(count_of(o.err, "error:") == 1);
  }
}

TEST_CASE("sluice eval under mpirun: ranks that share every sample find the losses of one rank",
          "[ranks][context]") {
  if (no_mpi()) return;
  const TinyRun t;
  REQUIRE(t.sluice({"train", t.config}).code == 0);
  const std::string task = t.folder / "letters.jsonl";
  test::write_bytes(task,
                    "{\"context\": \"after a comes\", \"choices\": [\"b\", \"c\"], \"answer\": 0}\n"
                    "{\"context\": \"after x comes\", \"choices\": [\"z\", \"y!\"], \"answer\": 1}\n");
  const auto eval = [&](int ranks, std::vector<std::string> more) {
    more.insert(more.begin(), {"eval", t.run});
    return Program(t.folder.path, more, {}, ranks).wait();
  };
  const auto results = [&](int ranks, std::vector<std::string> more) {
    more.push_back("--json");
    const Outcome o = eval(ranks, more);
    INFO(ranks << " ranks\n" << o.out << o.err);
    REQUIRE(o.code == 0);
    CHECK(count_of(o.out, "\n") == 1);
    return nlohmann::json::parse(o.out);
  };
  const nlohmann::json one = results(0, {}), answers = results(0, {"--tasks", task});
  for (const int ranks : {2, 4}) {
    const std::string context = fmt::format("parallel.context={}", ranks);
    const nlohmann::json shared = results(ranks, {context});
    for (const char* name : {"loss", "bits_per_byte"})
      CHECK(shared["sets"]["held_out"][name].get<double>() ==
            Approx(one["sets"]["held_out"][name].get<double>()).epsilon(1e-6));
    CHECK(shared["sets"]["held_out"]["tokens"] == one["sets"]["held_out"]["tokens"]);
    const nlohmann::json answered = results(ranks, {context, "--tasks", task});
    CHECK(answered["tasks"]["letters"]["answer_nats_per_byte"].get<double>() ==
          Approx(answers["tasks"]["letters"]["answer_nats_per_byte"].get<double>()).epsilon(1e-6));
  }
  const auto refused = [&](int ranks, const std::vector<std::string>& more, const std::string& text) {
    const Outcome o = eval(ranks, more);
    INFO(o.out << o.err);
    CHECK(o.code == 64);
    CHECK_THAT(o.err, Contains(text));
    CHECK(count_of(o.err, "error:") == 1);
  };
  refused(2, {}, "sluice eval: 2 ranks and parallel.context = 1; all ranks share every sample");
  refused(0, {"parallel.context=2", "--tasks", task},
          "sluice eval: 1 rank and parallel.context = 2; all ranks share");
  refused(2, {"parallel.context=2", "--per-token", t.folder / "losses.npy"}, "take whole samples");
  refused(2, {"parallel.context=2", "--zero-first-value", "all"}, "take whole samples");
}

TEST_CASE("ZeRO and expert parallelism under mpirun: the same bits, and a run resumes under any layout",
          "[ranks]") {
  if (no_mpi()) return;
  const TinyRun t;
  REQUIRE(train(t, 1, t.folder / "one").code == 0);
  const std::string run = t.folder / "moved";
  // Ended after the checkpoint of step 4.
  const Outcome killed =
      Program(t.folder.path, arguments(t, run, {"parallel.zero_stage=3", "parallel.expert=2"}),
              {{"SLUICE_EXIT", "1:6:9"}}, 2)
          .wait();
  CHECK(killed.code != 0);
  REQUIRE(io::exists(run + "/ckpt/step_00000004/MANIFEST.json"));
  const Outcome resumed = train(t, 4, run, {"parallel.zero_stage=2", "parallel.expert=4"});
  INFO(resumed.out << resumed.err);
  CHECK(resumed.code == 0);
  CHECK_THAT(resumed.out, Contains("(step 4)"));
  check_same(t, run, t.folder / "one", 8);
  CHECK(t.curve(run) == t.curve(t.folder / "one"));
}

TEST_CASE("rank 0 evaluates, between two steps, weights that all ranks have updated", "[ranks]") {
  if (no_mpi()) return;
  const TinyRun t;
  // More layers than ZeRO 3 keeps at a time, with sinks and constants, which are read after the forward pass.
  const auto evaluations = [&](int ranks, const char* stage) {
    const std::string run = t.folder / stage;
    const Outcome outcome =
        train(t, ranks, run,
              {"eval.every_steps=1", "checkpoint.every_steps=0", std::string("parallel.zero_stage=") + stage,
               "model.num_hidden_layers=4", "model.vocab_size=257", "model.attention.kind=sink",
               "model.attention.gates=[{position: sdpa_output}, {position: value, input: none}]",
               "analysis.query_classes=[{name: few, tokens: [1, 2, 3]}]"});
    INFO(outcome.out << outcome.err);
    REQUIRE(outcome.code == 0);
    std::istringstream lines(io::read_file(run + "/eval.jsonl"));
    std::vector<std::string> sets;
    for (std::string line; std::getline(lines, line);) sets.push_back(line);
    return sets;
  };
  const auto expected = evaluations(1, "0");
  CHECK(expected.size() == 8);
  for (const char* stage : {"1", "2", "3"}) CHECK(evaluations(2, stage) == expected);
}

TEST_CASE("ranks stopped by a signal save, and another number of ranks resumes", "[ranks]") {
  if (no_mpi()) return;
  const TinyRun t;
  REQUIRE(train(t, 1, t.folder / "whole", {"train.max_steps=400", "checkpoint.every_steps=100"}).code == 0);
  const std::string run = t.folder / "stopped";
  Program started(t.folder.path, arguments(t, run, {"train.max_steps=400", "checkpoint.every_steps=100"}), {},
                  2);
  REQUIRE(test::wait_until(
      [&] { return io::exists(run + "/metrics.jsonl") && !io::read_file(run + "/metrics.jsonl").empty(); }));
  started.signal(SIGUSR1);
  const Outcome stopped = started.wait();
  INFO(stopped.out << stopped.err);
  CHECK(stopped.code == 75);
  CHECK_THAT(stopped.out, Contains("stopped by") && Contains("saved; run the same command to go on"));
  const Outcome resumed = train(t, 4, run, {"train.max_steps=400", "checkpoint.every_steps=100"});
  INFO(resumed.out << resumed.err);
  CHECK(resumed.code == 0);
  check_same(t, run, t.folder / "whole", 400);
}

TEST_CASE("a folder in place of the newest manifest is passed over by all ranks", "[ranks]") {
  if (no_mpi()) return;
  const TinyRun t;
  const std::string run = t.folder / "damaged";
  const std::vector<std::string> more = {"train.max_steps=8", "checkpoint.every_steps=4"};
  REQUIRE(train(t, 2, run, more).code == 0);
  const std::string manifest = run + "/ckpt/step_00000008/MANIFEST.json";
  io::remove_file(manifest);
  io::make_directories(manifest);
  const Outcome resumed = train(t, 2, run, more);
  INFO(resumed.out << resumed.err);
  CHECK(resumed.code == 0);
  CHECK_THAT(resumed.err, Contains("step_00000008"));
  CHECK_THAT(resumed.out, Contains("(step 4)"));
}

TEST_CASE("a killed rank ends the others, and the run resumes from the last save", "[ranks]") {
  if (no_mpi()) return;
  const TinyRun t;
  const std::string run = t.folder / "killed";
  const std::vector<std::string> more = {"train.max_steps=100000", "checkpoint.every_steps=20",
                                         "log.every_steps=10"};
  Program started(t.folder.path, arguments(t, run, more), {}, 2);
  REQUIRE(test::wait_until([&] { return io::exists(run + "/ckpt/step_00000020/MANIFEST.json"); }));
  const auto status = status_of(run);
  kill(status.at("pid").get<pid_t>(), SIGKILL);
  const auto begin = std::chrono::steady_clock::now();
  const Outcome killed = started.wait();
  INFO(killed.out << killed.err);
  CHECK(killed.code != 0);
  CHECK(std::chrono::steady_clock::now() - begin <
        std::chrono::seconds(60));  // about one second on a quiet machine
  int64_t saved = 20;
  while (io::exists(step_folder(run, saved + 20) + "/MANIFEST.json")) saved += 20;
  const Outcome resumed =
      train(t, 1, run, {fmt::format("train.max_steps={}", saved + 5), "--allow-change", "train.max_steps"});
  INFO(resumed.out << resumed.err);
  CHECK(resumed.code == 0);
  CHECK_THAT(resumed.out, Contains(fmt::format("(step {})", saved)));
}

TEST_CASE("a stopped rank is detected, reported, and ended with all others", "[ranks]") {
  if (no_mpi()) return;
  const TinyRun t;
  const std::string run = t.folder / "stopped";
  Program started(t.folder.path,
                  arguments(t, run,
                            {"train.max_steps=1000000", "log.every_steps=10", "parallel.timeout_seconds=5",
                             "checkpoint.every_steps=0"}),
                  {}, 2);
  REQUIRE(test::wait_until(
      [&] { return io::exists(run + "/metrics.jsonl") && !io::read_file(run + "/metrics.jsonl").empty(); }));
  const auto pid = status_of(run).at("pid").get<pid_t>();
  kill(pid, SIGSTOP);
  const auto begin = std::chrono::steady_clock::now();
  const Outcome outcome = started.wait();
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 76);
  CHECK_THAT(outcome.err, Contains("rank 0 has not been heard of for") && Contains("all ranks end"));
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(90));  // about six on a quiet machine
  CHECK(test::wait_until([&] { return kill(pid, 0) != 0; }, 10));              // no orphaned process
}

TEST_CASE("the status of a run that one rank ends alone names the error, its exit code and the rank",
          "[ranks]") {
  if (no_mpi()) return;
  const TinyRun t;
  struct Case {
    const char *fault, *timeout, *error;
    int code;
  };
  const Case cases[] = {{"SLUICE_NOMEMORY", "60", "out of memory: ", 71},
                        {"SLUICE_HANG", "3", "rank {} computes without end: step 5", 76}};
  for (const auto& [fault, timeout, error, code] : cases)
    for (const int rank : {0, 1}) {
      const std::string run = t.folder / fmt::format("{}{}", fault, rank);
      INFO(fault << " on rank " << rank);
      const Outcome outcome =
          Program(t.folder.path, arguments(t, run, {std::string("parallel.timeout_seconds=") + timeout}),
                  {{fault, fmt::format("{}:5", rank)}}, 2)
              .wait();
      INFO(outcome.out << outcome.err);
      CHECK(outcome.code == code);
      const auto status = status_of(run);
      INFO(status.dump(2));
      CHECK(status["state"] == "failed");
      CHECK(status["exit_code"] == code);
      CHECK_THAT(status["error"].get<std::string>(), Contains(fmt::format(fmt::runtime(error), rank)));
      // Any rank may tell of a hang. Rank 0 writes status of its own errors, which name no rank.
      CHECK(status.value("failed_rank", -1) == (code == 76 || rank == 0 ? -1 : rank));
      // Not those of the status before, from the start of the run.
      CHECK(status["step"] == 5);
      CHECK(status["tokens"] == 5 * 8 * 16);
      CHECK(status["saved_step"] == 4);
      // The next start is a run like any other.
      const Outcome resumed = train(t, 2, run);
      CHECK(resumed.code == 0);
      const auto done = status_of(run);
      CHECK(done["state"] == "done");
      CHECK_FALSE(done.contains("error"));
    }
}

TEST_CASE("a rank that fails alone knows of a checkpoint that was written in the background", "[ranks]") {
  if (no_mpi()) return;
  const TinyRun t;
  // Rank 1 has taken part in one save, of whose success the others tell it only at the next one.
  const std::string run = t.folder / "alone", pause = t.folder / "pause", saved = step_folder(run, 4);
  Program started(t.folder.path, arguments(t, run, {"checkpoint.async=true"}),
                  {{"SLUICE_PAUSE", "1:step:5:" + pause}, {"SLUICE_NOMEMORY", "1:5"}}, 2);
  CHECK(test::wait_until([&] { return io::exists(pause + ".1") && io::exists(saved); }));
  std::filesystem::remove(pause + ".1");
  const Outcome outcome = started.wait();
  INFO(outcome.out << outcome.err);
  CHECK(outcome.code == 71);
  CHECK_THAT(outcome.err, Contains("; trained up to step 5, saved up to step 4 in " + saved));
  CHECK(status_of(run)["saved_step"] == 4);
}

TEST_CASE("scripts/launch restarts a run after a lost rank, and passes on its exit code", "[ranks]") {
  if (no_mpi() || std::system("command -v python3 >/dev/null") != 0) return;
  const TinyRun t;
  const std::string run = t.folder / "launched", log = t.folder / "launch.txt";
  std::string command = SLUICE_SOURCE_DIR "/scripts/launch -n 2 ";
  command += std::getenv("SLUICE_BINARY");
  for (const std::string& a :
       arguments(t, run, {"train.max_steps=60", "checkpoint.every_steps=20", "log.every_steps=10"}))
    command += " '" + a + "'";
  // Every start pauses at step 50, so that the first one is killed there however fast it is.
  const std::string pause = t.folder / "pause", paused = pause + ".0";
  const TempVariable variable("SLUICE_PAUSE", "0:step:50:" + pause);
  int code = -1;
  std::atomic<bool> ended = false;
  std::thread launched([&] {
    code = std::system((command + " >" + log + " 2>&1").c_str());
    ended = true;
  });
  const bool reached = test::wait_until([&] { return io::exists(paused) || ended; }) && !ended;
  if (reached) kill(status_of(run).at("pid").get<pid_t>(), SIGKILL);
  while (!ended) {
    std::filesystem::remove(paused);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  launched.join();
  INFO(io::read_file(log));
  REQUIRE(reached);
  CHECK(WIFEXITED(code));
  CHECK(WEXITSTATUS(code) == 0);
  CHECK_THAT(io::read_file(log), Contains("launch: exit status ") && Contains("resume   from"));
  CHECK(io::exists(run + "/ckpt/step_00000060/MANIFEST.json"));
}

TEST_CASE("scripts/launch does not wait for a launcher that has lost its ranks", "[ranks]") {
  if (no_mpi() || std::system("command -v python3 >/dev/null") != 0) return;
  const TinyRun t;
  const std::string stuck = t.folder / "stuck", log = t.folder / "launch.txt";
  // Its only child ends; it does not.
  io::write_file_atomic(stuck, "sleep 3 & wait; exec tail -f /dev/null\n");
  std::string command =
      SLUICE_SOURCE_DIR "/scripts/launch -n 2 --restarts 0 --patience 1 --mpirun 'bash " + stuck + "' ";
  command += std::getenv("SLUICE_BINARY");
  for (const std::string& a : arguments(t, t.folder / "never", {})) command += " '" + a + "'";
  const int code = std::system(("timeout 60 " + command + " >" + log + " 2>&1").c_str());
  INFO(io::read_file(log));
  CHECK(WIFEXITED(code));
  CHECK(WEXITSTATUS(code) == 137);
  CHECK_THAT(io::read_file(log), Contains("has had no ranks for 1 s and does not end: killing it"));
}

TEST_CASE("unsupported layouts are reported once, before anything is written", "[ranks]") {
  if (no_mpi()) return;
  const TinyRun t;
  const Outcome outcome = train(t, 3, t.folder / "three");
  CHECK(outcome.code == 64);
  CHECK_THAT(outcome.err, Contains("which 3 ranks cannot share evenly"));
  const size_t first = outcome.err.find("cannot share evenly");
  CHECK(outcome.err.find("cannot share evenly", first + 1) == std::string::npos);
}

TEST_CASE("data-parallel ranks on GPUs agree with a CPU", "[gpu_ranks]") {
  if (no_mpi()) return;
  if (cuda_devices().empty()) {
    WARN("skipped: no GPU");
    return;
  }
  const TinyRun t;
  const std::string stage = GENERATE("0", "3");
  INFO("ZeRO " << stage);
  const std::vector<std::string> more = {
      "parallel.determinism=same_layout", "parallel.zero_stage=" + stage,
      stage == "3" ? "parallel.expert=2" : "parallel.expert=1",
      "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8}", "train.max_steps=4"};
  const auto losses = [&](const std::string& run, int ranks, const char* device) {
    std::vector<std::string> all = more;
    all.push_back(fmt::format("train.device={}", device));
    const Outcome outcome = train(t, ranks, run, all);
    INFO(ranks << " ranks on " << device << "\n" << outcome.out << outcome.err);
    REQUIRE(outcome.code == 0);
    std::vector<double> found;
    std::istringstream lines(io::read_file(run + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);)
      found.push_back(nlohmann::json::parse(line).at("loss"));
    return found;
  };
  const auto cpu = losses(t.folder / "cpu", 2, "cpu"), gpu = losses(t.folder / "gpu", 2, "cuda"),
             again = losses(t.folder / "again", 2, "cuda");
  REQUIRE(cpu.size() == 4);
  REQUIRE(gpu.size() == 4);
  CHECK(gpu == again);
  for (size_t i = 0; i < cpu.size(); ++i) CHECK(gpu[i] == Approx(cpu[i]).epsilon(1e-4));
  check_same(t, t.folder / "gpu", t.folder / "again", 4);
}

}  // namespace sluice
