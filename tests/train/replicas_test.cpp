// Comparison of replicas: any changed bit on one rank is detected, and there are no false alarms.
#include "train/replicas.h"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <functional>
#include <random>

#include "comm/threads.h"
#include "core/parallel_for.h"
#include "run/run.h"
#include "support/temp_folder.h"
#include "support/tiny_training.h"

using namespace sluice;
using namespace sluice::test;
using Catch::Contains;

namespace {

/// Trains this many steps and returns the error of the first failed rank, with its code.
std::pair<std::string, ExitCode> train(const Config& config, int ranks, int64_t steps,
                                       const std::function<void(Trainer&, int rank)>& look = {}) {
  try {
    run_thread_ranks(ranks, [&](Communicator& comm) {
      set_num_threads(1);
      const Blend data(config.data.train, config.data.seq_len, config.model.vocab_size,
                       config.data.document_mask, config.train.seed);
      Trainer trainer(config, data, &comm);
      if (look) look(trainer, comm.rank());
      trainer.initialize();
      while (trainer.next_step() < steps) trainer.step();
      trainer.verify_replicas();
    });
  } catch (const Error& error) {
    return {error.what(), error.code()};
  }
  return {"", ExitCode::ok};
}

Config layout(const TinyTraining& t, int64_t zero_stage, int64_t every) {
  Config c = t.config;
  c.train.micro_batch_size = 1;
  c.data.validation.clear();
  c.parallel.zero_stage = zero_stage;
  c.parallel.verify_every_steps = every;
  return c;
}

MoeConfig mixture() {
  MoeConfig moe;
  moe.num_experts = 4;
  moe.num_experts_per_tok = 2;
  moe.moe_intermediate_size = 16;
  return moe;
}

/// A tensor of which a rank holds this part alone, or which it updates like every other rank.
struct Owned {
  std::string name;
  int64_t begin = 0, count = 0;  // for SLUICE_FLIP
};

/// What the optimizer of this rank owns: its weights, and its state.
std::vector<Owned> owned(Trainer& trainer, const Config& c) {
  std::vector<Owned> all;
  for (const Optimizer::Part& part : trainer.optimizer().parts()) {
    const std::string& name = trainer.store().spec(part.id).name;
    const int64_t count = part.state.front().second.numel();
    // Of weights that are whole here the flip counts elements from their beginning; of others, from the
    // part's.
    all.push_back({name, c.parallel.zero_stage < 3 ? part.begin : 0, count});
    for (const auto& [suffix, tensor] : part.state) all.push_back({name + suffix, 0, count});
  }
  return all;
}

/// "model.norm.weight" of "model.norm.weight.m".
std::string parameter_of(const std::string& tensor) {
  for (const char* suffix : {".m", ".v", ".master"})
    if (tensor.ends_with(suffix)) return tensor.substr(0, tensor.size() - std::string(suffix).size());
  return tensor;
}

/// SLUICE_FLIP of a random bit of one of the replicas.
std::string random_flip(std::mt19937_64& random, const std::vector<Replica>& replicas, int rank,
                        int64_t step) {
  const Replica& r = replicas[random() % replicas.size()];
  return fmt::format("{}:{}:{}:{}:{}", rank, step, r.name, random() % 1000000, random() % 64);
}

}  // namespace

TEST_CASE("deviating ranks: a minority, or all if there is no majority", "[replicas]") {
  CHECK(ranks_in_doubt({0, 1, 2}, {5, 5, 5}).empty());
  CHECK(ranks_in_doubt({0, 1, 2}, {5, 6, 5}) == std::vector<int>{1});
  CHECK(ranks_in_doubt({0, 1}, {5, 6}) == std::vector<int>{0, 1});
  CHECK(ranks_in_doubt({4, 5, 6, 7}, {1, 1, 2, 2}) == std::vector<int>{4, 5, 6, 7});
  CHECK(ranks_in_doubt({0, 1, 2, 3, 4}, {1, 2, 1, 3, 1}) == std::vector<int>{1, 3});
}

TEST_CASE("a flipped bit in a weight or moment of one rank is detected, and rank and tensor are named",
          "[replicas][ranks]") {
  const TinyTraining t;
  std::mt19937_64 random(1);
  const char* trials_text = std::getenv("SLUICE_FLIPS");
  const int trials = trials_text ? std::atoi(trials_text) : 12;
  int found = 0;
  for (int trial = 0; trial < trials; ++trial) {
    const int ranks = trial % 2 == 0 ? 4 : 2;
    const int64_t stage = trial / 2 % 3;  // with ZeRO 3 nothing is replicated
    Config c = layout(t, stage, 3);
    if (trial % 5 == 4) c.model.moe = mixture();
    if (trial % 7 == 6) c.train.precision = Precision::bf16;
    std::vector<Replica> replicas;
    REQUIRE(train(c, ranks, 0, [&](const Trainer& trainer, int rank) {
              if (rank == 0) replicas = trainer.replicas().replicas();
            }).second == ExitCode::ok);
    REQUIRE(!replicas.empty());
    const int victim = static_cast<int>(random() % static_cast<uint64_t>(ranks));
    const std::string flip = random_flip(random, replicas, victim, 3);
    const TempVariable variable("SLUICE_FLIP", flip);
    const auto [error, code] = train(c, ranks, 6);
    INFO("ZeRO " << stage << ", " << ranks << " ranks, " << flip << "\n" << error);
    CHECK(code == ExitCode::corruption);
    const std::string name = flip.substr(4, flip.find(':', 4) - 4);
    CHECK_THAT(error, Contains(" bits of " + parameter_of(name)) &&
                          Contains("after 3 steps (ranks were last found equal after 0)"));
    // The rank's own sums say which one it is; of another rank's slice of the weights only a majority can.
    if (ranks == 4 || error.find("than it wrote") != std::string::npos)
      CHECK_THAT(error, Contains(fmt::format("rank {} (host ", victim)) && Contains(" holds other bits "));
    else
      CHECK_THAT(error, Contains("ranks 0-1 (host ") && Contains("without a majority"));
    found += code == ExitCode::corruption;
  }
  WARN(found << " of " << trials << " flips found");
}

TEST_CASE("a flipped bit in what a rank owns is detected by the next update, at any step and on any layout",
          "[replicas][ranks]") {
  const TinyTraining t;
  std::mt19937_64 random(2);
  const char* trials_text = std::getenv("SLUICE_FLIPS");
  const int trials = trials_text ? std::atoi(trials_text) : 12;
  for (int trial = 0; trial < trials; ++trial) {
    const int64_t stage = trial % 4, step = 1 + static_cast<int64_t>(random() % 7);
    const int ranks = trial % 8 < 4 ? 2 : stage == 0 ? 1 : 4;
    Config c = layout(t, stage, 50);
    if (trial % 5 == 4) c.train.precision = Precision::bf16;
    if (trial % 3 == 2 && stage == 0) c.optimizer.type = OptimizerType::muon;
    if (trial % 7 == 6) c.model.moe = mixture();
    const int victim = static_cast<int>(random() % static_cast<uint64_t>(ranks));
    std::vector<Owned> tensors;
    REQUIRE(train(c, ranks, 0, [&](Trainer& trainer, int rank) {
              if (rank == victim) tensors = owned(trainer, c);
            }).second == ExitCode::ok);
    const Owned& from = tensors[random() % tensors.size()];
    const int64_t element = from.begin + static_cast<int64_t>(random() % static_cast<uint64_t>(from.count));
    const std::string flip = fmt::format("{}:{}:{}:{}:{}", victim, step, from.name, element, random() % 22);
    const TempVariable variable("SLUICE_FLIP", flip);
    const auto [error, code] = train(c, ranks, 9);
    INFO("ZeRO " << stage << ", " << ranks << " ranks, " << flip << "\n" << error);
    CHECK(code == ExitCode::corruption);
    CHECK_THAT(error, Contains(fmt::format("rank {} (host ", victim)) &&
                          Contains(" holds other bits of " + parameter_of(from.name) + " or its moments") &&
                          Contains(fmt::format("noticed after {} updates", step)) &&
                          Contains("reported after 9 steps"));
  }
}

TEST_CASE("a flipped weight that training has used is detected at the next comparison", "[replicas][ranks]") {
  const TinyTraining t;
  const TempVariable variable("SLUICE_FLIP",
                              "1:4:model.layers.1.mlp.up_proj.weight:100:0");  // the lowest bit
  Config c = layout(t, 0, 3);
  auto [error, code] = train(c, 2, 12);
  CHECK(code == ExitCode::corruption);
  CHECK_THAT(error, Contains("rank 1 (host ") && Contains("noticed after 4 updates") &&
                        Contains("after 6 steps (ranks were last found equal after 3)"));
  // Without comparison it is never found.
  c.parallel.verify_every_steps = 0;
  CHECK(train(c, 2, 12).second == ExitCode::ok);
}

TEST_CASE("equal replicas are never reported to differ", "[replicas][ranks]") {
  const TinyTraining t;
  const auto check = [&](const char* what, const Config& c, int ranks) {
    const auto [error, code] = train(c, ranks, 12);
    INFO(what << ", ZeRO " << c.parallel.zero_stage << ", " << ranks << " ranks\n" << error);
    CHECK(code == ExitCode::ok);
  };
  for (const int64_t stage : {0, 1, 2, 3}) {
    Config dense = layout(t, stage, 1);
    check("dense", dense, stage % 2 == 0 ? 4 : 2);
    Config moe = dense;
    moe.model.moe = mixture();
    moe.model.moe.router_z_loss_coefficient = 1e-3;
    check("experts", moe, 2);
    moe.parallel.expert = 2;
    check("shared experts", moe, 4);
    Config adapted = dense;
    adapted.lora.rank = 2;
    adapted.lora.targets = {"q_proj", "down_proj"};
    adapted.train.precision = Precision::bf16;
    check("adapters in bf16", adapted, 2);
    Config exact = dense;
    exact.parallel.determinism = Determinism::exact;
    check("exact", exact, 2);
    if (stage > 0) continue;
    check("alone", dense, 1);
    Config muon = dense;
    muon.optimizer.type = OptimizerType::muon;
    check("muon", muon, 2);
  }
}

TEST_CASE("an update that is not applied is no change of memory", "[replicas][ranks]") {
  const TinyTraining t;
  for (const int ranks : {1, 2})
    for (const int64_t stage : {0, 2}) {
      Config c = layout(t, stage, 1);
      // The first update makes every weight huge, so that no later step is finite.
      c.optimizer.lr = 1e30;
      c.optimizer.warmup_steps = 0;
      INFO(ranks << " ranks, ZeRO " << stage);
      CHECK_NOTHROW(run_thread_ranks(ranks, [&](Communicator& comm) {
        set_num_threads(1);
        const Blend data = t.blend();
        Trainer trainer(c, data, &comm);
        trainer.initialize();
        for (int step = 0; step < 6; ++step)
          if (trainer.step().skipped != (step > 0)) throw std::runtime_error("not the steps to skip");
        trainer.verify_replicas();
      }));
    }
}

TEST_CASE("weights and moments from outside are no change of memory", "[replicas]") {
  const TinyTraining t;
  const Config c = layout(t, 0, 1);
  const auto [error, code] = train(c, 1, 6, [](Trainer& trainer, int) {
    trainer.initialize();
    trainer.step();
    // Initialised once more, as by a restore.
  });
  INFO(error);
  CHECK(code == ExitCode::ok);
}

TEST_CASE("a run ends with the exit code of corruption, and names the last good checkpoint",
          "[replicas][ranks]") {
  const TinyTraining t;
  Config c = layout(t, 0, 5);
  c.model.vocab_size = 0;  // of the tokenizer that the program makes
  c.train.max_steps = 12;
  c.checkpoint.every_steps = 4;
  c.checkpoint.every_minutes = 0;
  c.checkpoint.async = false;
  c.log.console = ConsoleMode::none;
  c.run_dir = t.folder / "flipped";
  io::write_file_atomic(t.folder / "flipped.yaml", to_yaml(c));
  const TempVariable variable("SLUICE_FLIP", "2:9:model.norm.weight.v:3:30");
  const StopSignals signals;
  std::string error;
  ExitCode code{};
  try {
    run_thread_ranks(4, [&](Communicator& ranks) {
      set_num_threads(1);
      RunOptions options;
      options.config_path = t.folder / "flipped.yaml";
      options.ranks = &ranks;
      options.signals = &signals;
      run_training(options);
    });
  } catch (const Error& e) {
    error = e.what();
    code = e.code();
  }
  INFO(error);
  CHECK(code == ExitCode::corruption);
  CHECK_THAT(error, Contains("rank 2 (host ") && Contains("model.norm.weight or its moments") &&
                        Contains("after 10 steps (ranks were last found equal after 8)") &&
                        Contains("/flipped/ckpt/step_00000008"));
  CHECK(!io::exists(c.run_dir + "/ckpt/step_00000012"));
  CHECK_THAT(io::read_file(c.run_dir + "/status.json"), Contains("\"exit_code\": 79"));
}
