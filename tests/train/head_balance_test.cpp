// Training with head balance: scopes and ranks, checkpoints, reported values, and the effect.
#include <catch2/catch.hpp>
#include <cmath>
#include <mutex>

#include "comm/threads.h"
#include "config/load.h"
#include "support/enums.h"
#include "support/model.h"
#include "support/tiny_training.h"

using namespace sluice;
using namespace sluice::test;

namespace {

/// Four heads in two layers; their importance is defined by "softmax", "sink" or "gate".
struct Balanced : TinyTraining {
  explicit Balanced(const std::string& mechanism, Precision precision = Precision::f32)
      : TinyTraining(precision) {
    ModelConfig& m = config.model;
    m.num_attention_heads = 4;
    m.num_key_value_heads = 2;
    m.head_dim = 8;
    m.attention.gates.clear();
    if (mechanism == "gate") m.attention.gates = {GateConfig{.granularity = GateGranularity::headwise}};
    if (mechanism == "sink") m.attention.kind = AttentionKind::sink;
    config.data.validation.clear();
    balance().coefficient = 0.1;
  }
  HeadBalanceConfig& balance() { return config.model.attention.head_balance; }
};

std::vector<double> numbers_of(Trainer& trainer) {
  std::vector<double> all;
  const ParamStore& store = trainer.store();
  for (size_t i = 0; i < store.specs().size(); ++i) {
    const Tensor value = store.value(static_cast<ParamStore::Id>(i));
    for (int64_t j = 0; j < value.numel(); ++j) all.push_back(Pool::get(value, j));
  }
  return all;
}

struct Outcome {
  std::vector<double> weights;
  std::string heads;
};

Outcome train(const Balanced& t, int ranks, int64_t micro_batch, int64_t steps) {
  Config config = t.config;
  config.train.micro_batch_size = micro_batch;
  Outcome outcome;
  std::mutex mutex;
  run_thread_ranks(ranks, [&](Communicator& c) {
    set_num_threads(1);
    const Blend data = t.blend();
    Trainer trainer(config, data, &c);
    trainer.initialize();
    for (int64_t i = 0; i < steps; ++i) trainer.step();
    const std::string heads = trainer.content().state.at("heads").dump();
    const std::scoped_lock lock(mutex);
    if (outcome.heads.empty()) outcome = {numbers_of(trainer), heads};
    if (outcome.heads != heads || outcome.weights != numbers_of(trainer))
      throw std::runtime_error("ranks disagree");
  });
  return outcome;
}

double largest_difference(const Outcome& a, const Outcome& b) {
  double worst = 0;
  for (size_t i = 0; i < a.weights.size(); ++i)
    worst = std::max(worst, std::abs(a.weights[i] - b.weights[i]));
  return worst;
}

}  // namespace

TEST_CASE("scopes beyond the micro-batch train the same model for any data-parallel layout",
          "[heads][ranks]") {
  for (const std::string mechanism : {"softmax", "sink", "gate"})
    for_each_value<HeadBalanceScope>([&](HeadBalanceScope scope) {
      INFO(mechanism << ", scope " << static_cast<int>(scope));
      Balanced t(mechanism, Precision::f64);
      t.balance().scope = scope;
      const double difference = largest_difference(train(t, 1, 4, 3), train(t, 2, 2, 3));
      // The mean over a smaller batch differs; otherwise the other comparisons would prove nothing.
      if (scope == HeadBalanceScope::micro_batch)
        CHECK(difference > 1e-8);
      else
        CHECK(difference < 1e-10);
    });
}

TEST_CASE("exact training with head balance has the same bits on one rank and two, for any shared heads",
          "[heads][ranks]") {
  Balanced t("softmax",
             GENERATE(Precision::f32, Precision::f64));  // sums of few numbers of f32 are exact in any order
  t.config.parallel.determinism = Determinism::exact;
  t.config.train.global_batch_size = 8;
  t.balance().scope = HeadBalanceScope::previous_step;
  t.balance().shared_heads = 1;
  t.balance().calibration_samples = 9;  // two steps
  const Outcome one = train(t, 1, 1, 4), two = train(t, 2, 1, 4);
  CHECK(one.weights == two.weights);
  CHECK(one.heads == two.heads);
}

TEST_CASE("training with head balance resumes bit for bit, also in the middle of the calibration",
          "[heads][trainer]") {
  const OneThread one_thread;
  const bool calibrates = GENERATE(false, true);
  Balanced t("sink");
  t.balance().scope = calibrates ? HeadBalanceScope::micro_batch : HeadBalanceScope::previous_step;
  t.balance().shared_heads = calibrates ? 1 : 0;
  t.balance().calibration_samples = 12;  // three steps of four
  const Blend data = t.blend();
  Trainer straight(t.config, data);
  straight.initialize();
  for (int i = 0; i < 6; ++i) {
    straight.step();
    const auto state = straight.content().state.at("heads");
    double shared = 0;
    for (const double s : state.at("shared")) shared += s;
    if (calibrates)
      CHECK(shared ==
            (i < 2 ? 8 : 2));  // none is left out during calibration; then all but one in each of two layers
    CHECK((straight.step_loss<HeadBalanceState>().summary()->balance_loss > 0) == (i > (calibrates ? 2 : 0)));
  }

  Trainer half(t.config, data);
  half.initialize();
  half.step();
  half.step();
  CheckpointContent content = half.content();
  content.config_yaml = to_yaml(t.config);
  CheckpointStore store(t.folder / "ckpt", t.config.checkpoint, content);
  store.save(content);
  REQUIRE(store.wait());
  Trainer resumed(t.config, data);
  resumed.restore(newest_valid_checkpoint(t.folder / "ckpt"));
  for (int i = 0; i < 4; ++i) resumed.step();
  CHECK(all_bits(resumed) == all_bits(straight));
  CHECK(resumed.content().state == straight.content().state);
}

TEST_CASE("head balance lowers the imbalance, counts every token once, and has no effect with coefficient 0",
          "[heads][trainer]") {
  const OneThread one_thread;
  for (const std::string mechanism : {"softmax", "sink", "gate"}) {
    INFO(mechanism);
    std::vector<double> imbalance;
    for (const double coefficient : {1e-9, 3.0}) {
      Balanced t(mechanism);
      t.balance().coefficient = coefficient;
      t.config.train.recompute = Recompute::block;
      const Blend data = t.blend();
      Trainer trainer(t.config, data);
      trainer.initialize();
      for (int i = 0; i < 20; ++i) trainer.step();
      const HeadSummary s = *trainer.step_loss<HeadBalanceState>().summary();
      const Tensor rows = trainer.step_loss<HeadBalanceState>().totals();
      // 4 samples of 32 tokens; the first of a sample counts unless the importance is that of softmax.
      CHECK(Pool::get(rows, 4) == (mechanism == "softmax" ? 4 * 31 : 4 * 32));
      CHECK(Pool::get(rows, 5) == 2);
      CHECK(s.layers.size() == 2);
      CHECK(s.importance > 0.1);
      CHECK(s.importance < 1);
      imbalance.push_back(s.imbalance);
    }
    CHECK(imbalance[0] > 0);
    CHECK(imbalance[1] < 0.6 * imbalance[0]);
  }
  std::string bits;
  for (const bool otherwise : {false, true}) {
    Balanced t("sink");
    t.balance().coefficient = 0;
    if (otherwise) t.balance().scope = HeadBalanceScope::previous_step, t.balance().shared_heads = 2;
    const Blend data = t.blend();
    Trainer trainer(t.config, data);
    trainer.initialize();
    trainer.step();
    CHECK_FALSE(trainer.step_loss<HeadBalanceState>().summary());
    CHECK_FALSE(trainer.content().state.contains("heads"));
    if (otherwise) CHECK(all_bits(trainer) == bits);
    bits = all_bits(trainer);
  }
}
