// Training with sparse attention: it learns, resumes and is the same on any ranks.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <mutex>

#include "checkpoint/store.h"
#include "comm/threads.h"
#include "config/load.h"
#include "core/parallel_for.h"
#include "support/tiny_training.h"
#include "train/fresh_start.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct SparseTraining : TinyTraining {
  explicit SparseTraining(BudgetPolicy policy = BudgetPolicy::inverse, Precision precision = Precision::f32)
      : TinyTraining(precision) {
    config.model.attention.kind = AttentionKind::sparse;
    SparseConfig& s = config.model.attention.sparse;
    s.indexer.heads = 2;
    s.indexer.head_dim = 8;
    s.k = {.policy = policy, .base = 8, .min = 4, .max = 14};
    s.loss.temperature = 3;
    s.loss.learn_temperature = true;
    config.data.document_mask = true;
    config.data.validation.clear();
    config.train.micro_batch_size = 1;
    config.train.global_batch_size = 8;
  }
};

double scalar_of(const Trainer& trainer, const std::string& name) {
  for (const StepScalar& s : trainer.scalars())
    if (s.name == name && s.layer < 0) return s.value;
  throw std::runtime_error("no scalar " + name);
}

double first_loss(const Config& config, const Blend& data) {
  Trainer trainer(config, data);
  trainer.initialize();
  return trainer.step().loss;
}

/// All bits, with the running means, of a training on these ranks.
std::string train(const TinyTraining& t, int ranks, int64_t zero_stage, int64_t steps) {
  std::string all;
  std::mutex mutex;
  Config config = t.config;
  config.parallel.zero_stage = zero_stage;
  run_thread_ranks(ranks, [&](Communicator& c) {
    set_num_threads(1);
    const Blend data = t.blend();
    Trainer trainer(config, data, &c);
    trainer.initialize();
    std::string mine;
    for (int64_t i = 0; i < steps; ++i) {
      const StepMetrics m = trainer.step();
      mine += fmt::format("{:a} {:a} {:a} {:a}\n", m.loss, m.grad_norm, scalar_of(trainer, "indexer/kl"),
                          scalar_of(trainer, "indexer/mean_k"));
    }
    mine += trainer.content().state.at("indexer").dump();
    const std::scoped_lock lock(mutex);
    if (all.empty()) all = mine;
    if (all != mine) throw std::runtime_error("ranks disagree");
  });
  return all;
}

}  // namespace

TEST_CASE("sparse training learns the text, and the indexer what attention sees", "[sparse]") {
  for (const Precision precision : {Precision::f32, Precision::bf16}) {
    /// The KL divergence at the end of a training that selects this many keys.
    const auto trained_kl = [&](int64_t keys, bool train_indexer) {
      SparseTraining t(BudgetPolicy::fixed, precision);
      t.config.train.max_steps = 40;
      t.config.model.attention.sparse.k.base = keys;
      if (!train_indexer) t.config.optimizer.rules = {{".indexer.", 1.0, std::nullopt, false}};
      const Blend data = t.blend();
      Trainer trainer(t.config, data);
      trainer.initialize();
      std::vector<double> losses;
      double kl = 0;
      for (int i = 0; i < 40; ++i) {
        losses.push_back(trainer.step().loss);
        if (i >= 36) kl += scalar_of(trainer, "indexer/kl") / 4;
      }
      CHECK(losses.back() < losses.front() - 0.7);
      CHECK(scalar_of(trainer, "indexer/mean_k") <= static_cast<double>(keys));
      CHECK(scalar_of(trainer, "indexer/mean_k") > 5);
      return kl;
    };
    CHECK(std::isfinite(trained_kl(8, true)));
    // Over sets of other keys the divergence is another one, so it is compared where all are selected.
    const double with = trained_kl(32, true), without = trained_kl(32, false);
    INFO("KL " << with << ", of a frozen indexer " << without);
    CHECK(with < 0.9 * without);
  }
}

TEST_CASE("sparse training resumes bit for bit, within and between phases, with the running means",
          "[sparse]") {
  for (const int64_t phase_steps : {0, 1, 2, 3}) {  // the run is cut off after step 2
    SparseTraining t(BudgetPolicy::inverse, phase_steps == 0 ? Precision::bf16 : Precision::f32);
    t.config.model.attention.sparse.phase_steps = phase_steps;
    const Blend data = t.blend();
    Trainer whole(t.config, data), first(t.config, data), second(t.config, data);
    whole.initialize();
    first.initialize();
    for (int i = 0; i < 2; ++i) first.step();
    CheckpointContent content = first.content();
    content.config_yaml = to_yaml(t.config);
    CheckpointStore store(t.folder / "ckpt", t.config.checkpoint, content);
    store.save(content);
    REQUIRE(store.wait());
    second.restore(newest_valid_checkpoint(t.folder / "ckpt"));
    // An evaluation made up here computes what one before the cut would have.
    CHECK(second.model().dense_warm_up() == first.model().dense_warm_up());
    CHECK(first.model().dense_warm_up() == (phase_steps > 1));
    CHECK(Trainer(t.config, data).model().dense_warm_up() == (phase_steps > 0));
    for (int i = 0; i < 5; ++i) whole.step();
    for (int i = 0; i < 3; ++i) second.step();
    CHECK((all_bits(whole) == all_bits(second)));
    CHECK(whole.content().state == second.content().state);
    const auto means = whole.content().state.at("indexer").at("mean_variance").get<std::vector<double>>();
    REQUIRE(means.size() == 2);
    CHECK(means[0] > 0);
    CHECK(means[0] != means[1]);
  }
}

TEST_CASE("a dense model becomes a sparse one: all its weights are kept, and with a warm-up its function",
          "[sparse]") {
  SparseTraining t(BudgetPolicy::fixed);
  Config dense = t.config;
  dense.model.attention.kind = AttentionKind::softmax;
  const Blend data = t.blend();
  Trainer source(dense, data);
  source.initialize();
  for (int i = 0; i < 2; ++i) source.step();
  CheckpointContent content = source.content();
  content.config_yaml = to_yaml(dense);
  CheckpointStore store(t.folder / "dense", dense.checkpoint, content);
  store.save(content);
  REQUIRE(store.wait());
  dense.train.init_from = t.config.train.init_from = newest_valid_checkpoint(t.folder / "dense").path;
  t.config.train.init_missing = InitMissing::fresh;
  for (const int64_t phase_steps : {0, 3}) {
    Config config = t.config;
    config.model.attention.sparse.phase_steps = phase_steps;
    Trainer trainer(config, data);
    const FreshStart fresh = trainer.initialize();
    CHECK(fresh.changes_function.empty() == (phase_steps > 0));
    CHECK(grown(dense.model, config.model).attention.kind ==
          (phase_steps > 0 ? AttentionKind::sparse : AttentionKind::softmax));
    size_t indexers = 0, others = 0;
    for (size_t i = 0; i < trainer.store().specs().size(); ++i) {
      const std::string& name = trainer.store().specs()[i].name;
      const Tensor here = trainer.store().value(static_cast<ParamStore::Id>(i));
      if (name.find(".indexer.") != std::string::npos) {
        indexers += std::count(fresh.missing.begin(), fresh.missing.end(), name) == 1;
        continue;
      }
      for (size_t j = 0; j < source.store().specs().size(); ++j)
        if (source.store().specs()[j].name == name)
          others += std::memcmp(here.data, source.store().value(static_cast<ParamStore::Id>(j)).data,
                                static_cast<size_t>(here.bytes())) == 0;
    }
    CHECK(indexers == fresh.missing.size());
    CHECK(indexers > 0);
    CHECK(others == source.store().specs().size());
    const double loss = trainer.step().loss;
    CHECK((loss == first_loss(dense, data)) == (phase_steps > 0));
  }
}

TEST_CASE("exact sparse training has the same bits on 1, 2 and 4 ranks and every ZeRO stage",
          "[sparse][ranks]") {
  SparseTraining t;
  t.config.parallel.determinism = Determinism::exact;
  t.config.model.attention.sparse.phase_steps = 1;
  const std::string one = train(t, 1, 0, 4);
  for (const int64_t zero_stage : {0, 1, 2, 3})
    for (const int ranks : {2, 4}) {
      INFO(ranks << " ranks, ZeRO " << zero_stage);
      CHECK((train(t, ranks, zero_stage, 4) == one));
    }
}

TEST_CASE("in the dense warm-up with all else frozen the indexer alone changes, and its loss falls",
          "[sparse]") {
  SparseTraining t(BudgetPolicy::fixed);
  t.config.model.attention.sparse.phase = SparsePhase::dense_warm_up;
  t.config.optimizer.rules = {{"", 1.0, std::nullopt, false}, {".indexer.", 3.0, std::nullopt, true}};
  t.config.optimizer.rules[0].match = "model";
  t.config.optimizer.rules[1].match = ".indexer.";
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  const auto bits = [&](bool indexer) {
    std::string all;
    for (size_t i = 0; i < trainer.store().specs().size(); ++i) {
      const Tensor v = trainer.store().value(static_cast<ParamStore::Id>(i));
      if ((trainer.store().specs()[i].name.find(".indexer.") != std::string::npos) == indexer)
        all.append(static_cast<const char*>(v.data), static_cast<size_t>(v.bytes()));
    }
    return all;
  };
  const std::string model = bits(false), indexer = bits(true);
  std::vector<double> kl;
  for (int i = 0; i < 20; ++i) {
    trainer.step();
    kl.push_back(scalar_of(trainer, "indexer/kl"));
  }
  CHECK((bits(false) == model));
  CHECK((bits(true) != indexer));
  CHECK(kl.back() < 0.9 * kl.front());
}
