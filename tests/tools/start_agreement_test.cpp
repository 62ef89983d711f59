// Ranks started with different programs, configurations or data end before training, with a message that
// lists the differences.
#include "run/start_agreement.h"

#include <sys/stat.h>

#include "comm/collective_errors.h"
#include "comm/threads.h"
#include "core/build_id.h"
#include "core/cpu_features.h"
#include "run/run.h"
#include "support/no_mpi.h"
#include "tools/tiny_run.h"

namespace sluice {
namespace {

using Catch::Contains;
using test::count_of;
using test::no_mpi;
using test::Outcome;
using test::Program;
using test::TinyRun;
using Words = std::vector<std::string>;

/// The error of two thread ranks, of which the second has its own overrides and configuration file.
std::string started_apart(const TinyRun& t, const Words& other, ExitCode& code,
                          const std::string& other_config = "", const Words& first = {}) {
  const StopSignals signals;
  try {
    run_thread_ranks(2, [&](Communicator& ranks) {
      RunOptions options;
      options.config_path = t.config;
      options.overrides = {"train.micro_batch_size=1", "train.global_batch_size=4", "log.console=none"};
      options.ranks = &ranks;
      options.signals = &signals;
      const Words& own = ranks.rank() == 1 ? other : first;
      options.overrides.insert(options.overrides.end(), own.begin(), own.end());
      if (ranks.rank() == 1 && !other_config.empty()) options.config_path = other_config;
      run_training(options);
    });
  } catch (const Error& error) {
    code = error.code();
    return error.what();
  }
  code = ExitCode::ok;
  return "";
}

/// Two processes of different commands under mpirun.
Outcome mixed(const TinyRun& t, const Words& first, const Words& second, const Words& second_program = {}) {
  const std::string binary = std::getenv("SLUICE_BINARY");
  Words all = first;
  all.insert(all.end(), {":", "-n", "1"});
  const Words program = second_program.empty() ? Words{binary} : second_program;
  all.insert(all.end(), program.begin(), program.end());
  all.insert(all.end(), second.begin(), second.end());
  return Program(t.folder.path, all, {}, 1).wait();
}

}  // namespace

TEST_CASE("a key whose value differs on one rank ends all ranks before a folder is created",
          "[ranks][agreement]") {
  const TinyRun t;
  const std::pair<const char*, const char*> cases[] = {
      {"train.seed=8", "train.seed: 1234 on rank 0"},
      {"optimizer.lr=2e-2", "optimizer.lr: 0.01 on rank 0"},
      {"optimizer.beta2=0.9", "optimizer.beta2: 0.95 on rank 0"},
      {"optimizer.weight_decay=0", "optimizer.weight_decay: 0.1 on rank 0"},
      {"optimizer.schedule=linear", "optimizer.schedule: cosine on rank 0"},
      {"train.max_grad_norm=2", "train.max_grad_norm: 1 on rank 0"},
      {"model.rope.theta=5000", "model.rope.theta: 10000 on rank 0"},
      {"data.document_mask=true", "data.document_mask: false on rank 0"},
      {"train.precision=bf16", "train.precision: f32 on rank 0"},
      {"model.attention.output_activation=silu", "model.attention.output_activation: none on rank 0"},
      {"model.attention.gates=[]", "model.attention.gates[0].position: sdpa_output on rank 0"},
      {"parallel.determinism=exact", "parallel.determinism: same_layout on rank 0"},
      {"train.on_nonfinite=stop", "train.on_nonfinite: skip on rank 0"},
      {"model.hidden_size=32", "model.hidden_size: 16 on rank 0"},
      {"model.num_hidden_layers=2", "model.num_hidden_layers: 1 on rank 0"},
      {"train.micro_batch_size=2", "train.micro_batch_size: 1 on rank 0"},
      {"train.global_batch_size=8", "train.global_batch_size: 4 on rank 0"},
      {"train.max_steps=9", "train.max_steps: 8 on rank 0"},
      {"data.seq_len=8", "data.seq_len: 16 on rank 0"},
      {"model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8}",
       "model.moe.num_experts: 0 on rank 0"},
      {"parallel.zero_stage=2", "parallel.zero_stage: 0 on rank 0"},
      {"parallel.verify_every_steps=7", "parallel.verify_every_steps: 50 on rank 0"},
      {"run_dir=elsewhere", "run_dir: "},
      {"checkpoint.every_steps=3", "checkpoint.every_steps: 4 on rank 0"},
      {"log.bits=1", "log.bits: 0 on rank 0"},
      {"eval.every_steps=2", "eval.every_steps: 0 on rank 0"},
      {"optimizer.type=muon", "optimizer.type: adamw on rank 0"},
  };
  for (const auto& [override_text, expected] : cases) {
    ExitCode code{};
    const std::string error = started_apart(t, {override_text}, code);
    INFO(override_text << "\n" << error);
    CHECK_THAT(error,
               Contains(std::string("ranks do not agree on ") + expected) && Contains(" on rank 1 (host "));
    CHECK(code == ExitCode::usage);
    CHECK(!io::exists(t.run));
  }
}

TEST_CASE("ranks compare the contents of their files, not the paths", "[ranks][agreement]") {
  const TinyRun t;
  ExitCode code{};
  test::write_corpus(t.folder / "other", 4000, 257);
  for (const char* set : {"train", "validation"}) {
    const std::string error =
        started_apart(t,
                      {fmt::format("data.{}=[{{name: {}, path: {}}}]", set,
                                   set == std::string("train") ? "tiny" : "held_out", t.folder / "other")},
                      code);
    INFO(error);
    CHECK_THAT(error, Contains(fmt::format("ranks do not agree on the contents of data.{}", set)) &&
                          Contains("tokens, xxh3-whole:"));
    CHECK(code == ExitCode::data);
  }
  for (const char* rank : {"0", "1"})
    io::write_file_atomic(
        t.folder / "questions" + rank + ".jsonl",
        std::string(R"({"context": "a", "choices": ["b", "c"], "answer": )") + rank + "}\n");
  const std::string questions =
      started_apart(t, {fmt::format("eval.tasks=[{}]", t.folder / "questions1.jsonl")}, code, "",
                    {fmt::format("eval.tasks=[{}]", t.folder / "questions0.jsonl")});
  INFO(questions);
  CHECK_THAT(questions, Contains("ranks do not agree on the contents of eval.tasks[0]: xxh3:"));
  CHECK(code == ExitCode::data);
  // The same tokens in another folder, the same configuration under another name, and another number of
  // threads are not differences.
  io::make_directories(t.folder / "copy");
  for (const char* file : {"train.bin", "train.idx"})
    io::write_file_atomic(t.folder / "copy/" + file, io::read_file(t.folder / file));
  const std::string error =
      started_apart(t,
                    {fmt::format("data.train=[{{name: tiny, path: {}}}]", t.folder / "copy/train"),
                     "name=other", "train.threads=2"},
                    code);
  INFO(error);
  CHECK(code == ExitCode::ok);
  CHECK(io::exists(t.run + "/ckpt/step_00000008/MANIFEST.json"));
}

TEST_CASE("all differences and errors of single ranks are in one message", "[ranks][agreement]") {
  const TinyRun t;
  ExitCode code{};
  std::string error = started_apart(t, {"train.seed=8", "optimizer.lr=2e-2", "parallel.zero_stage=1"}, code);
  INFO(error);
  for (const char* key : {"train.seed: ", "optimizer.lr: ", "parallel.zero_stage: "})
    CHECK_THAT(error, Contains(std::string("ranks do not agree on ") + key));
  CHECK_THAT(error, Contains("nothing was computed"));

  error = started_apart(t, {"data.train=[{name: tiny, path: absent}]"}, code);
  CHECK_THAT(error, Contains("rank 1 (host ") && Contains("absent"));
  CHECK(code == ExitCode::no_input);
  error = started_apart(t, {"train.sede=8"}, code);
  CHECK_THAT(error, Contains("rank 1 (host ") && Contains("unknown key train.sede"));
  CHECK(code == ExitCode::usage);
  error = started_apart(t, {}, code, t.folder / "absent.yaml");
  CHECK_THAT(error, Contains("rank 1 (host ") && Contains("absent.yaml"));
  CHECK(code == ExitCode::no_input);
  CHECK(!io::exists(t.run));
}

TEST_CASE("facts round-trip through text, and ranks are listed as ranges", "[agreement]") {
  StartFacts facts;
  facts.set("a", "1");
  facts.set("b", "", ExitCode::data);
  facts.set("a", "2 = two");
  const StartFacts back = StartFacts::parse(facts.serialize());
  REQUIRE(back.all().size() == 2);
  CHECK(back.find("a")->value == "2 = two");
  CHECK(back.find("b")->code == ExitCode::data);
  CHECK(StartFacts::parse("torn").all().empty());
  CHECK(rank_ranges({0, 1, 2, 5, 7, 8}) == "0-2, 5, 7-8");
}

TEST_CASE(
    "processes that mpirun starts with different arguments, files, instructions or builds end at once with "
    "one message",
    "[ranks][agreement]") {
  if (no_mpi()) return;
  const TinyRun t;
  const std::string binary = std::getenv("SLUICE_BINARY");
  const Words same = {"train", t.config, "train.micro_batch_size=1", "parallel.determinism=exact"};
  const auto with = [&](const std::string& more) {
    Words words = same;
    words.push_back(more);
    return words;
  };
  const auto check = [&](const Outcome& outcome, int code, const std::string& text) {
    INFO(outcome.out << outcome.err);
    CHECK(outcome.code == code);
    CHECK(count_of(outcome.err, text) == 1);
    CHECK(!io::exists(t.run));
  };
  check(mixed(t, same, with("train.seed=8")), 64, "ranks do not agree on train.seed: 1234 on rank 0 (host ");
  check(mixed(t, same, with(fmt::format("data.train=[{{name: tiny, path: {}}}]", t.folder / "held_out"))), 65,
        "ranks do not agree on the contents of data.train: ");
  check(mixed(t, with("model.hidden_size=17"), same), 64, "rank 0 (host ");
  if (cpu_isa() != Isa::baseline)
    check(mixed(t, same, same, {"env", "SLUICE_ISA=baseline", binary}), 64,
          "ranks do not agree on the instruction set (SLUICE_ISA): ");
  check(mixed(t, with("train.precision=bf16"), with("train.precision=bf16"),
              {"env", "SLUICE_ISA=amx_emulated", binary}),
        64, "ranks do not agree on what multiplies bf16 (SLUICE_ISA): ");

  // A program that differs only in its build identifier.
  std::string bytes = io::read_file(binary), id;
  const std::string own = program_build_id();
  REQUIRE(own != "unknown");
  const size_t note = bytes.find(std::string("\x14\0\0\0\3\0\0\0GNU\0", 12));
  REQUIRE(note != std::string::npos);
  bytes[note + 12] = static_cast<char>(bytes[note + 12] ^ 1);
  const std::string other = t.folder / "sluice";
  io::write_file_atomic(other, bytes);
  REQUIRE(chmod(other.c_str(), 0755) == 0);
  check(mixed(t, same, same, {other}), 64, "ranks do not agree on the program: sluice ");
}

TEST_CASE(
    "an analysis of ranks with different checkpoints, keys or data is refused before anything is written",
    "[ranks][agreement]") {
  if (no_mpi()) return;
  const TinyRun t;
  const std::string other = t.folder / "other";
  REQUIRE(t.train().code == 0);
  REQUIRE(t.train({"run_dir=" + other, "train.seed=8"}).code == 0);
  const auto analyze = [&](const std::string& run, const Words& more) {
    Words words = {"analyze", run, "-o", t.folder / "analysis"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  struct Case {
    std::string run;
    Words more;
    int code;
    std::string text;
  };
  const std::string data = "held_out=" + t.folder / "train";
  const Case cases[] = {
      {t.run, {"data.seq_len=8"}, 64, "ranks do not agree on data.seq_len: 16 on rank 0 (host "},
      {t.run, {"--tokens", "64"}, 64, "ranks do not agree on --tokens: 16384 on rank 0 (host "},
      {t.run,
       {"--data", data},
       65,
       "ranks do not agree on the contents of the validation set held_out: 503 tokens, "},
      {t.run,
       {"--data", data, "--data", "more=" + t.folder / "train"},
       64,
       "ranks do not agree on the validation sets (--set, --data): held_out on rank 0 (host "},
      {other, {}, 64, "ranks do not agree on the checkpoint: step 8, manifest xxh3:"},
      {t.folder / "absent", {}, 66, "rank 1 (host "}};
  for (const auto& [run, more, code, text] : cases) {
    const Outcome outcome = mixed(t, analyze(t.run, {}), analyze(run, more));
    INFO(text << "\n" << outcome.out << outcome.err);
    CHECK(outcome.code == code);
    CHECK(count_of(outcome.err, text) == 1);
    CHECK(!io::exists(t.folder / "analysis"));
  }
  // Of folders of another program weights and configuration are compared.
  const std::string exported = t.folder / "exported", elsewhere = t.folder / "elsewhere";
  REQUIRE(t.sluice({"export", t.run, "-o", exported}).code == 0);
  REQUIRE(t.sluice({"export", other, "-o", elsewhere}).code == 0);
  const Words held_out = {"--data", "held_out=" + t.folder / "held_out", "data.seq_len=16"};
  const Outcome apart = mixed(t, analyze(exported, held_out), analyze(elsewhere, held_out));
  INFO(apart.out << apart.err);
  CHECK(apart.code == 65);
  CHECK(count_of(apart.err, "ranks do not agree on the weights of the model: 1 file, xxh3:") == 1);
  CHECK(count_of(apart.err, "ranks do not agree on") == 1);
  CHECK(!io::exists(t.folder / "analysis"));

  // A copy of the run elsewhere is no difference.
  std::filesystem::copy(t.run, t.folder / "copy", std::filesystem::copy_options::recursive);
  const Outcome same = mixed(t, analyze(t.run, {}), analyze(t.folder / "copy", {"train.threads=2"}));
  INFO(same.out << same.err);
  CHECK(same.code == 0);
  CHECK(io::exists(t.folder / "analysis/analysis.json"));
}

TEST_CASE("a rank whose peer never initialises MPI does not wait forever", "[ranks][agreement]") {
  if (no_mpi()) return;
  const TinyRun t;
  const Outcome outcome =
      mixed(t, {"train", t.config, "parallel.timeout_seconds=2"}, {"config", "show", t.config});
  INFO(outcome.out << outcome.err);
  CHECK((outcome.code == 76 || outcome.code == 1));  // 1: mpirun has detected the other process itself
  CHECK_THAT(outcome.err, Contains("rank 0: MPI_Init has not returned for 2 s") && Contains("all ranks end"));
}

}  // namespace sluice
