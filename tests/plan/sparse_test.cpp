// What a plan says of the models of Gated Sparse Attention: parameters, and FLOPs of the selected pairs.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <regex>

#include "config/load.h"
#include "plan/cost_model.h"
#include "plan/plan.h"
#include "support/model.h"
#include "support/tiny_training.h"

using namespace sluice;
using Catch::Contains;

namespace {

Plan plan_of(const std::string& row) {
  return make_plan(
      load_config(SLUICE_SOURCE_DIR "/configs/sparse/" + row + ".yaml", {"train.check_limits=false"}));
}

}  // namespace

TEST_CASE("parameters of the 1.7B rows are those of the paper's parts", "[plan][sparse]") {
  const int64_t base = 1685686272;
  // 24 layers of width 2048: gates on 4 x 128 values and 16 x 128 outputs; an indexer of 4 heads of 64.
  const int64_t value_gate = 24 * 2048 * 512, output_gate = 24 * 2048 * 2048, gate_biases = 24 * (512 + 2048),
                indexer = 24 * 2048 * (4 * 64 + 64 + 4), biases = 24 * 8, means = 24;
  CHECK(plan_of("table4_01_standard").total == base);
  CHECK(value_gate + output_gate + gate_biases == 125890560);  // as the paper's reference rows have it
  CHECK(plan_of("table4_03_gated_only").total == base + 125890560);
  CHECK(plan_of("table4_03_gated_only").gate_parameters == 125890560);
  CHECK(plan_of("table10_02_value_gate").total == base + value_gate + 24 * 512 + indexer + biases + means);
  CHECK(plan_of("table10_03_output_gate").total == base + output_gate + 24 * 2048 + indexer + biases + means);
  CHECK(plan_of("table10_01_no_gates").total == base + indexer + biases + means);
  CHECK(plan_of("policy_fixed").total == base + 125890560 + indexer + biases);
  const Plan gsa = plan_of("table4_04_gsa");
  CHECK(gsa.total == base + 125890560 + indexer + biases + means);
  CHECK(gsa.trained == gsa.total - means);
  CHECK(plan_of("table4_02_sparse_only").total == base + indexer + 24 * 64);  // the norm of its keys
}

TEST_CASE("the documented rules for an indexer alone train nothing else, with a tied head and an untied one",
          "[plan][sparse]") {
  std::ifstream file(SLUICE_SOURCE_DIR "/configs/sparse/README.md");
  const std::string page((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::regex pattern(R"((rules: |optimizer.rules=)(\[\{match: [^\]]*trainable: false[^\]]*\]))");
  int found = 0;
  for (auto at = std::sregex_iterator(page.begin(), page.end(), pattern); at != std::sregex_iterator(); ++at)
    for (const std::string row : {"table4_02_sparse_only", "proxy/table4_02_sparse_only"}) {
      INFO((*at)[2] << " " << row);
      const Config config =
          load_config(SLUICE_SOURCE_DIR "/configs/sparse/" + row + ".yaml",
                      {"train.check_limits=false", "model.attention.sparse.phase=dense_warm_up",
                       "optimizer.rules=" + (*at)[2].str()});
      const ModelConfig& m = config.model;
      const IndexerConfig& indexer = m.attention.sparse.indexer;
      CHECK(m.tie_word_embeddings == (row != "table4_02_sparse_only"));
      const int64_t projections =
          m.hidden_size * (indexer.heads * indexer.head_dim + indexer.head_dim + indexer.heads);
      CHECK(make_plan(config).trained == m.num_hidden_layers * (projections + indexer.head_dim));
      ++found;
    }
  CHECK(found == 4);
}

TEST_CASE("FLOPs of a sparse model fall with k, and those of the attention alone", "[plan][sparse]") {
  double before = 0;
  for (const char* row : {"table11_k_512", "table11_k_1024", "table11_k_2048", "table11_k_4096"}) {
    const double flops = plan_of(row).flops.activations;
    CHECK(flops > before);
    before = flops;
  }
  // With k = 4096 every pair of a sequence of 4096 is attended to.
  const Plan all = plan_of("table11_k_4096"), dense = plan_of("table4_03_gated_only");
  const double pairs = 4097.0 / 2, attention = 24 * 4.0 * 16 * 128, index = 24 * 2.0 * 4 * 64;
  CHECK(dense.flops.activations == Approx(attention * 2048));
  CHECK(all.flops.activations == Approx((attention + index) * pairs));
}

TEST_CASE("a running mean of the scores' variance is no frozen parameter", "[plan][sparse]") {
  const Plan plan = plan_of("policy_inverse");
  CHECK(plan.trained < plan.total);
  CHECK(plan.frozen == 0);
  CHECK_THAT(plan_text(plan), !Contains("frozen") && !Contains("  trained "));
  CHECK(scale_model(plan).dense == plan.total);
}

TEST_CASE("FLOPs count both phases by their steps, and the indexer's loss only where it has one",
          "[plan][sparse]") {
  const auto of = [](std::vector<std::string> overrides) {
    overrides.push_back("train.max_steps=200");
    return make_plan(load_config(SLUICE_SOURCE_DIR "/configs/sparse/proxy/policy_fixed.yaml", overrides));
  };
  const std::string steps = "model.attention.sparse.phase_steps=";
  const double sparse = of({}).flops_per_token,
               dense = of({"model.attention.sparse.phase=dense_warm_up"}).flops_per_token;
  CHECK(dense > 1.01 * sparse);
  CHECK(of({steps + "199"}).flops_per_token == Approx(0.995 * dense + 0.005 * sparse));
  const Plan half = of({steps + "50"});
  CHECK(half.flops_per_token == Approx(0.25 * dense + 0.75 * sparse));
  CHECK_THAT(plan_text(half), Contains("+ attention, dense in 50 of 200 steps"));
  // Nothing of an indexer without a loss is differentiated, nor frozen weights behind a detached input.
  const Plan joint = of({}), idle = of({"model.attention.sparse.loss.coefficient=0"}),
             frozen = of({"optimizer.rules=[{match: .indexer., trainable: false}]"});
  CHECK(idle.flops.forward() == Approx(joint.flops.forward()));
  CHECK(frozen.flops.forward() == Approx(joint.flops.forward()));
  CHECK(idle.flops.backward() < frozen.flops.backward());
  CHECK(frozen.flops.backward() < joint.flops.backward());
}

TEST_CASE("every row of sparse attention trains, in both precisions", "[rows][sparse]") {
  const test::OneThread one_thread;
  test::TemporaryFolder folder;
  test::write_corpus(folder / "text", 4000, 257);
  int rows = 0;
  for (const auto& entry : std::filesystem::directory_iterator(SLUICE_SOURCE_DIR "/configs/sparse/proxy")) {
    INFO(entry.path().string());
    Config config =
        load_config(entry.path().string(),
                    {"data.seq_len=48", "data.train=[{name: text, path: " + (folder / "text") + "}]",
                     "data.validation=[]", "model.attention.sparse.k.min=4", "train.micro_batch_size=2",
                     "train.global_batch_size=4", "train.max_steps=60", "optimizer.warmup_steps=1",
                     rows % 2 ? "train.precision=bf16" : "train.precision=f32"});
    config.model.vocab_size = 257;
    const Blend data(config.data.train, config.data.seq_len, config.model.vocab_size, false,
                     config.train.seed);
    Trainer trainer(config, data);
    trainer.initialize();
    const double first = trainer.step().loss;
    CHECK(first == Approx(std::log(257.0)).margin(1.0));
    trainer.step();
    const StepMetrics last = trainer.step();
    CHECK(last.loss < first);
    CHECK_FALSE(last.skipped);
    CHECK(trainer.scalars().empty() == (config.model.attention.kind != AttentionKind::sparse));
    ++rows;
  }
  CHECK(rows == 19);
}
