// Training adapters: from a checkpoint, on one rank and several, across saves, and merged.
#include <catch2/catch.hpp>
#include <cstring>
#include <mutex>

#include "comm/threads.h"
#include "config/load.h"
#include "core/io.h"
#include "core/parallel_for.h"
#include "eval/trained_model.h"
#include "hf/config.h"
#include "hf/merge_adapters.h"
#include "plan/plan.h"
#include "support/model.h"
#include "support/tiny_training.h"

using namespace sluice;
using namespace sluice::test;

namespace {

std::string bits_of(const std::vector<NamedTensor>& tensors, bool adapters) {
  std::string bits;
  for (const NamedTensor& t : tensors)
    if ((t.name.find(".lora_") != std::string::npos) == adapters)
      bits.append(static_cast<const char*>(t.tensor.data), static_cast<size_t>(t.tensor.bytes()));
  return bits;
}

/// A model trained for some steps, and the configuration that trains its adapters.
struct Adapting : TinyTraining {
  std::string base, base_bits;
  explicit Adapting(Precision precision = Precision::f32, int heads = 2) : TinyTraining(precision) {
    if (heads > 2) {
      config.model.num_attention_heads = heads;
      config.model.head_dim = 8;
      config.model.attention.gates = {GateConfig{.granularity = GateGranularity::headwise}};
    }
    config.model.vocab_size = 257;  // of the tokenizer that a checkpoint's configuration names
    const Blend data = blend();
    Trainer trainer(config, data);
    trainer.initialize();
    for (int i = 0; i < 3; ++i) trainer.step();
    base_bits = bits_of(trainer.content().weights, false);
    base = save_checkpoint(folder / "base", trainer, config);
    config.train.init_from = base;
    config.lora = {.rank = 4, .alpha = 8};
    config.train.seed = 99;
    config.parallel.timeout_seconds = 60;
  }
};

std::vector<double> logits_of(const TrainedModel& trained, const Blend& data) {
  const int64_t T = 32;
  Arena none("buffers"), host("host");
  make_forward_buffers(trained, none, host, T, Recompute::none);
  Arena arena("buffers", none.high_water()), host_memory("host", std::max<int64_t>(host.high_water(), 64));
  ForwardBuffers b = make_forward_buffers(trained, arena, host_memory, T, Recompute::none);
  data.fill(0, 1, b.batch.tokens.as<int32_t>(), b.batch.targets.as<int32_t>(),
            b.batch.positions.as<int32_t>(), b.batch.first_key.as<int32_t>());
  Context ctx(1 << 22);
  trained.model().forward(ctx, b.batch, b.saved);
  Pool pool;
  const Tensor out = pool.zeros(accumulate_dtype(trained.dtype()), {T, trained.config().model.vocab_size});
  trained.model().logits(ctx, out, b.saved.hidden);
  std::vector<double> all;
  for (int64_t i = 0; i < out.numel(); ++i) all.push_back(Pool::get(out, i));
  return all;
}

}  // namespace

TEST_CASE("adapters balance the heads of a trained model, except the shared heads found by calibration",
          "[lora][heads]") {
  const OneThread one_thread;
  Adapting t(Precision::f32, 4);
  t.config.lora.targets = {"q_proj", "self_attn.gate_proj"};
  t.config.train.max_steps = 60;
  HeadBalanceConfig& balance = t.config.model.attention.head_balance;
  balance.calibration_samples = 8;
  const auto imbalance = [&](double coefficient, int64_t shared_heads) {
    balance.coefficient = coefficient;
    balance.shared_heads = shared_heads;
    const Blend data = t.blend();
    Trainer trainer(t.config, data);
    trainer.initialize();
    for (int i = 0; i < 40; ++i) trainer.step();
    const bool kept = bits_of(trainer.content().weights, false) == t.base_bits;
    CHECK(kept);
    if (shared_heads > 0) {
      const auto shared = trainer.content().state.at("heads").at("shared").get<std::vector<double>>();
      REQUIRE(shared.size() == 8);
      for (size_t layer = 0; layer < 2; ++layer)
        CHECK(shared[4 * layer] + shared[4 * layer + 1] + shared[4 * layer + 2] + shared[4 * layer + 3] ==
              shared_heads);
    }
    return trainer.step_loss<HeadBalanceState>().summary()->imbalance;
  };
  const double without = imbalance(1e-12, 0), even = imbalance(0.3, 0), but_one = imbalance(0.3, 1);
  INFO("imbalance " << without << " without, " << even << " with the loss, " << but_one
                    << " with one head shared");
  CHECK(even < 0.6 * without);
  CHECK(but_one < without);
  CHECK(but_one > even);
}

TEST_CASE("adapters learn, frozen weights keep every bit, and a resumed run is equal", "[lora]") {
  const OneThread one_thread;
  for (const Precision precision : {Precision::f32, Precision::bf16, Precision::f64}) {
    Adapting t(precision);
    const Blend data = t.blend();
    Trainer trainer(t.config, data);
    trainer.initialize();
    const std::string frozen = bits_of(trainer.content().weights, false),
                      first = bits_of(trainer.content().weights, true);
    const bool as_loaded = frozen == t.base_bits;
    CHECK(as_loaded);
    double begin = 0, end = 0;
    std::string saved;
    for (int i = 0; i < 8; ++i) {
      const double loss = trainer.step().loss;
      if (i == 0) begin = loss;
      end = loss;
      if (i == 4) saved = save_checkpoint(t.config.run_dir + "/ckpt", trainer, t.config);
    }
    CHECK(end < begin);
    const bool kept = bits_of(trainer.content().weights, false) == frozen,
               learnt = bits_of(trainer.content().weights, true) != first;
    CHECK(kept);
    CHECK(learnt);
    for (const NamedTensor& m : trainer.content().optimizer)
      CHECK(m.name.find(".lora_") != std::string::npos);

    Trainer resumed(t.config, data);
    resumed.restore(verify_checkpoint(saved));
    for (int i = 0; i < 3; ++i) resumed.step();
    const bool same = all_bits(resumed) == all_bits(trainer);
    CHECK(same);
  }
}

TEST_CASE("a plan with adapters has no gradients and moments of frozen weights", "[lora][plan]") {
  const OneThread one_thread;
  Adapting t(Precision::bf16);
  const Plan plan = make_plan(t.config);
  // q, k, v, o, gate of attention; gate, up, down: rank x (in + out) each, of two layers.
  const int64_t expected =
      2 * 4 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + (32 + 32) + 2 * (32 + 48) + (48 + 32));
  CHECK(plan.trained == expected);
  CHECK(plan.total == count_parameters(t.config.model) + expected);
  CHECK(plan.memory.gradients < 4 * expected + 4096);
  CHECK(plan.memory.optimizer < 12 * expected + 16384);
  t.config.lora = {};
  const Plan whole = make_plan(t.config);
  CHECK(whole.trained == whole.total);
  CHECK(plan.flops_per_token < whole.flops_per_token);
}

TEST_CASE(
    "adapters on several ranks at every ZeRO stage: the numbers of one rank, and frozen weights keep their "
    "bits",
    "[lora][ranks]") {
  const OneThread one_thread;
  Adapting t;
  const auto train = [&](int ranks, int64_t stage, Determinism determinism) {
    struct {
      std::string frozen, saved;
      double loss = 0, norm = 0;
    } out;
    Config config = t.config;
    config.parallel.zero_stage = stage;
    config.parallel.determinism = determinism;
    config.run_dir = t.folder / fmt::format("ranks{}_{}_{}", ranks, stage, static_cast<int>(determinism));
    std::mutex mutex;
    run_thread_ranks(ranks, [&](Communicator& c) {
      set_num_threads(1);
      const Blend data = t.blend();
      Trainer trainer(config, data, &c);
      trainer.initialize();
      StepMetrics m;
      for (int i = 0; i < 3; ++i) m = trainer.step();
      const std::string path = save_checkpoint(config.run_dir + "/ckpt", trainer, config, &trainer.ranks());
      const std::scoped_lock lock(mutex);
      out.loss = m.loss, out.norm = m.grad_norm, out.saved = path;
    });
    return out;
  };
  const auto one = train(1, 0, Determinism::exact);
  const std::vector<double> expected = logits_of(TrainedModel(verify_checkpoint(one.saved), 32), t.blend());
  for (const int64_t stage : {0, 1, 2, 3}) {
    INFO("zero_stage " << stage);
    const auto two = train(2, stage, Determinism::exact);
    CHECK(two.loss == one.loss);
    CHECK(two.norm == one.norm);
    CHECK(logits_of(TrainedModel(verify_checkpoint(two.saved), 32), t.blend()) == expected);
    // One rank resumes from the checkpoint of two.
    Config config = t.config;
    config.parallel.zero_stage = 0;
    const Blend data = t.blend();
    Trainer trainer(config, data);
    trainer.restore(verify_checkpoint(two.saved));
    CHECK(std::isfinite(trainer.step().loss));
  }
  CHECK(train(2, 0, Determinism::same_layout).loss == Approx(one.loss).epsilon(1e-5));
}

TEST_CASE("merged adapters give the same logits, from a folder without adapters", "[lora]") {
  const OneThread one_thread;
  for (const auto& [precision, tolerance] :
       {std::pair{Precision::f32, 2e-6}, {Precision::f64, 1e-13}, {Precision::bf16, 2e-2}}) {
    Adapting t(precision);
    const Blend data = t.blend();
    Trainer trainer(t.config, data);
    trainer.initialize();
    for (int i = 0; i < 6; ++i) trainer.step();
    const CheckpointInfo saved =
        verify_checkpoint(save_checkpoint(t.config.run_dir + "/ckpt", trainer, t.config));
    CHECK(nlohmann::json::parse(io::read_file(saved.path + "/config.json"))["lora"]["rank"] == 4);
    const std::string folder = t.folder / "merged";
    CHECK(merge_adapters(saved, folder) == 2 * 8);
    CHECK_THROWS_WITH(merge_adapters(saved, folder), Catch::Contains("exists; nothing was written"));
    CHECK_FALSE(nlohmann::json::parse(io::read_file(folder + "/config.json")).contains("lora"));

    // Another run can start from the merged folder, which contains no adapters.
    Config plain = t.config;
    plain.lora = {};
    plain.train.init_from = folder;
    Trainer merged(plain, data);
    merged.initialize();
    const CheckpointInfo from_merged = verify_checkpoint(save_checkpoint(t.folder / "again", merged, plain));
    const std::vector<double> a = logits_of(TrainedModel(saved, 32), data),
                              b = logits_of(TrainedModel(from_merged, 32), data);
    double worst = 0, largest = 0;
    for (size_t i = 0; i < a.size(); ++i)
      worst = std::max(worst, std::abs(a[i] - b[i])), largest = std::max(largest, std::abs(a[i]));
    INFO("worst " << worst << " of " << largest);
    CHECK(worst < tolerance * largest);
    CHECK_THROWS_WITH(merge_adapters(from_merged, t.folder / "twice"), Catch::Contains("has no adapters"));
    // Without merging they do not fit a model without adapters.
    plain.train.init_from = saved.path;
    Trainer unmerged(plain, data);
    CHECK_THROWS_WITH(unmerged.initialize(),
                      Catch::Contains("unexpected: self_attn.q_proj.lora_A.weight in 2 layers") &&
                          Catch::Contains("sluice checkpoint merge"));
  }
}
