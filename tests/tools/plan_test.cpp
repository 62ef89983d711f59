// The program `sluice plan`: planned memory compared with that of real ranks, and estimates for many GPUs.
#include "comm/mpi.h"
#include "tools/tiny_run.h"

namespace sluice {
namespace {

using Catch::Contains;
using test::Outcome;
using test::Program;
using test::TinyRun;

const std::vector<std::string> kLarge = {"model.hidden_size=512", "model.num_hidden_layers=6",
                                         "model.intermediate_size=512"};

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

nlohmann::json plan(const TinyRun& t, const std::vector<std::string>& more) {
  const Outcome outcome = t.sluice(std::vector<std::string>{"plan", t.config, "--json"} + more);
  INFO(outcome.err);
  REQUIRE(outcome.code == 0);
  return nlohmann::json::parse(outcome.out);
}

/// Resident memory of the largest rank at its peak.
int64_t peak(const TinyRun& t, int ranks, const std::string& folder, const std::vector<std::string>& more) {
  const Outcome outcome =
      Program(t.folder.path,
              t.train_arguments(std::vector<std::string>{"--run-dir", t.folder / folder} + more), {},
              ranks > 1 ? ranks : 0)
          .wait();
  INFO(outcome.out << outcome.err);
  REQUIRE(outcome.code == 0);
  return outcome.peak_bytes;
}

}  // namespace

TEST_CASE("plan knows the memory of one rank and of each of two", "[plan]") {
  const TinyRun t;
  // The program, its libraries and their pools are in both, so the difference is the model.
  const std::vector<std::string> steps = {"train.max_steps=2", "checkpoint.every_steps=0",
                                          "train.micro_batch_size=1"};
  std::map<int, int64_t> rest;  // by number of ranks: memory of a small model in addition to its plan
  for (const auto& [ranks, zero] : {std::pair{1, 0}, {2, 0}, {2, 2}, {2, 3}}) {
    if (ranks > 1 && (!built_with_mpi() || std::system("command -v mpirun >/dev/null") != 0)) continue;
    const auto planned = [&](const std::vector<std::string>& more) {
      return plan(t, more + std::vector<std::string>{"--ranks", std::to_string(ranks)})["memory"]["total"]
          .get<int64_t>();
    };
    if (!rest.count(ranks))
      rest[ranks] = peak(t, ranks, fmt::format("small_{}", ranks), steps) - planned(steps);
    const std::vector<std::string> large =
        steps + kLarge + std::vector<std::string>{fmt::format("parallel.zero_stage={}", zero)};
    const int64_t expected = planned(large),
                  measured = peak(t, ranks, fmt::format("large_{}_{}", ranks, zero), large) - rest[ranks];
    INFO(ranks << " ranks, ZeRO " << zero << ": planned " << static_cast<double>(expected) / 1048576
               << " MiB, measured " << static_cast<double>(measured) / 1048576);
    CHECK(expected > (zero == 3 ? 40 << 20 : 55 << 20));  // with AVX2 weights have no packed copies
    CHECK(static_cast<double>(measured) == Approx(static_cast<double>(expected)).epsilon(0.05));
  }
}

TEST_CASE("plan's memory equals what the run reports, per rank", "[plan]") {
  if (!built_with_mpi() || std::system("command -v mpirun >/dev/null") != 0) return;
  const TinyRun t;
  const std::vector<std::string> experts = {
      "parallel.expert=2", "model.moe={num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 8}"};
  for (const std::vector<std::string>& layout :
       {std::vector<std::string>{}, {"parallel.zero_stage=1"}, {"parallel.zero_stage=3"}, experts}) {
    const auto arguments =
        std::vector<std::string>{"train.micro_batch_size=1", "model.hidden_size=64"} + layout;
    const Outcome run =
        Program(t.folder.path,
                t.train_arguments(arguments +
                                  std::vector<std::string>{"train.max_steps=1",
                                                           fmt::format("run_dir={}/r{}", t.folder.path,
                                                                       layout.size() ? layout[0] : "0")}),
                {}, 2)
            .wait();
    INFO(run.out << run.err);
    REQUIRE(run.code == 0);
    const nlohmann::json two = plan(t, arguments + std::vector<std::string>{"--ranks", "2"});
    CHECK(two["ranks"] == 2);
    for (const char* what : {"parameters", "gradients", "optimizer", "activations", "scratch", "batch"}) {
      const size_t line = run.out.find(fmt::format("  {:<16}", what), run.out.find("memory   MiB"));
      REQUIRE(line != std::string::npos);
      CHECK(std::stod(run.out.substr(line + 18)) ==
            Approx(two["memory"][what].get<double>() / (1 << 20)).margin(0.06));
    }
  }
  const Outcome text = t.sluice({"plan", t.config, "train.micro_batch_size=1", "--ranks", "2"});
  CHECK_THAT(text.out, Contains("memory of each of 2 ranks (f32)") && Contains("1 on each of 2 ranks"));
  const Outcome refused = t.sluice({"plan", t.config, "train.micro_batch_size=1", "--ranks", "3"});
  CHECK(refused.code == 64);
  CHECK_THAT(refused.err, Contains("tiny.yaml:15:30: train.global_batch_size = 2 is 2 micro-batches of 1, "
                                   "which 3 ranks cannot share evenly"));
  CHECK(t.sluice({"plan", t.config, "--ranks", "0"}).code == 64);
}

TEST_CASE("plan --gpus prints one table and the best layout, or why there is none", "[plan][scale]") {
  const TinyRun t;
  const std::string paper = SLUICE_SOURCE_DIR "/configs/gated_attention/base_15a2b.yaml";
  Outcome outcome = t.sluice({"plan", paper, "--gpus", "512,1024", "--expert-parallel", "8,16", "--zero",
                              "1,3", "train.recompute=none"});
  CHECK(outcome.code == 0);
  CHECK_THAT(outcome.out, Contains("nothing is measured") &&
                              Contains("best of these: 1024 GPUs, expert parallel 16, ZeRO 1"));
  outcome = t.sluice({"plan", paper, "--gpus", "512", "--json", "--gradient-dtype", "f32", "--nic", "90",
                      "--gpu-mfu", "0.3"});
  REQUIRE(outcome.code == 0);
  const nlohmann::json json = nlohmann::json::parse(outcome.out)["scale"];
  CHECK(json["measured"] == false);
  CHECK(json["assumptions"]["nic_gb_s"] == 90);
  CHECK(json["assumptions"]["gradient_bytes"] == 4);
  CHECK(json["assumptions"]["gpu_mfu"] == 0.3);
  CHECK(json["layouts"].size() == 3);  // expert parallel 8, 16, 32
  outcome = t.sluice({"plan", t.config, "--gpus", "100,16", "train.precision=bf16"});
  CHECK(outcome.code == 64);
  CHECK_THAT(outcome.err, Contains("100 GPUs are not whole nodes of 8") &&
                              Contains("train.global_batch_size = 2 is smaller"));
  outcome = t.sluice({"plan", paper, "--ranks", "8", "--zero", "3"});
  CHECK(outcome.code == 64);
  CHECK_THAT(outcome.err, Contains("--zero has no effect without --gpus"));
  // The default peak is that of bf16.
  outcome = t.sluice({"plan", paper, "--gpus", "512", "train.precision=f32"});
  CHECK(outcome.code == 64);
  CHECK_THAT(outcome.err, Contains("give the peak of f32 with --peak-tflops"));
  CHECK(t.sluice({"plan", paper, "--gpus", "512", "train.precision=f32", "--peak-tflops", "67"}).code == 0);
  outcome = t.sluice({"plan", paper, "--gpus", "64", "--nic", "-1"});
  CHECK(outcome.code == 64);
  CHECK_THAT(outcome.err, Contains("NIC GB/s must be above 0, got -1"));
}

}  // namespace sluice
