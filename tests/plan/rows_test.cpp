// The small proxy of every row of the paper's tables trains: three steps on a synthetic text, with recompute
// none and block.
#include <filesystem>

#include "config/load.h"
#include "plan/plan.h"
#include "support/model.h"
#include "support/tiny_training.h"

using namespace sluice;
using namespace sluice::test;

namespace {

/// Three steps of a row's proxy on a synthetic text.
Config tiny(const std::string& path, const std::string& text) {
  Config config = load_config(
      path, {"data.seq_len=32", "data.train=[{name: text, path: " + text + "}]", "data.validation=[]",
             "model.moe.moe_intermediate_size=32",  // most of the time would be the initial weights
             "train.micro_batch_size=2", "train.global_batch_size=4", "train.max_steps=3",
             "optimizer.warmup_steps=1"});
  resolve_parameter_match(config);
  if (config.model.vocab_size == 0) config.model.vocab_size = 257;
  return config;
}

}  // namespace

TEST_CASE("every row of the sink-aware paper trains", "[rows]") {
  const OneThread one_thread;
  TemporaryFolder folder;
  write_corpus(folder / "text", 4000, 257);
  int rows = 0;
  for (const std::string preset : {"adamw", "nanochat"})
    for (const auto& entry :
         std::filesystem::directory_iterator(SLUICE_SOURCE_DIR "/configs/sink_aware/proxy/" + preset)) {
      INFO(entry.path().string());
      const Config config = tiny(entry.path().string(), folder / "text");
      const Blend data(config.data.train, config.data.seq_len, config.model.vocab_size, false,
                       config.train.seed);
      Trainer trainer(config, data);
      trainer.initialize();
      const double first = trainer.step().loss;
      CHECK(first == Approx(std::log(257.0)).margin(1.0));
      trainer.step();
      const StepMetrics last = trainer.step();
      CHECK(last.loss < first);
      CHECK(std::isfinite(last.grad_norm));
      ++rows;
    }
  CHECK(rows == 36);
}

TEST_CASE("every row of the paper's tables trains", "[rows]") {
  const OneThread one_thread;
  TemporaryFolder folder;
  write_corpus(folder / "text", 4000, 257);
  int rows = 0, with_experts = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(SLUICE_SOURCE_DIR "/configs/gated_attention/proxy")) {
    INFO(entry.path().string());
    Config config = tiny(entry.path().string(), folder / "text");
    config.train.recompute = rows % 2 ? Recompute::block : Recompute::none;
    // All models of the paper are mixtures of experts, except those of table 2 and of appendix A.5.
    const bool experts = config.model.moe.num_experts > 0;
    const std::string name = entry.path().filename().string();
    CHECK(experts == (name.compare(0, 6, "table2") != 0 && name.compare(0, 3, "a5_") != 0));
    with_experts += experts;
    const Blend data(config.data.train, config.data.seq_len, config.model.vocab_size, false,
                     config.train.seed);
    Trainer trainer(config, data);
    trainer.initialize();
    const double first = trainer.step().loss;
    CHECK(first == Approx(std::log(257.0)).margin(1.0));
    trainer.step();
    const StepMetrics last = trainer.step();
    CHECK(trainer.step_loss<RouterBalanceState>().totals().empty() != experts);
    CHECK(last.loss < first);
    CHECK(std::isfinite(last.grad_norm));
    CHECK_FALSE(last.skipped);
    ++rows;
  }
  CHECK(rows ==
        52);  // 16 + 14 + 7 + 7 + 6 + 2: tables 1 (its row 4 in both readings), 2, 3, 4 and 6, appendix A.5
  CHECK(with_experts == 36);
}
