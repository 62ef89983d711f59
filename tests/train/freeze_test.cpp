// Training with frozen parameters (optimizer.rules): alone and on several ranks, through saves, and as
// planned.
#include <catch2/catch.hpp>
#include <cstring>
#include <map>
#include <mutex>

#include "comm/threads.h"
#include "config/load.h"
#include "hf/config.h"
#include "plan/cost_model.h"
#include "plan/plan.h"
#include "support/model.h"
#include "support/tiny_training.h"

using namespace sluice;
using namespace sluice::test;

namespace {

ParameterRule freeze(const char* match) {
  ParameterRule rule;
  rule.match = match;
  rule.trainable = false;
  return rule;
}

ParameterRule thaw(const char* match) {
  ParameterRule rule;
  rule.match = match;
  return rule;
}

struct Outcome {
  std::map<std::string, std::string> first, last;
  double loss = 0, norm = 0;
};

Outcome train(const Config& config, const TinyTraining& t, int ranks, int64_t steps) {
  WholeState first, last;
  Outcome outcome;
  std::mutex mutex;
  run_thread_ranks(ranks, [&](Communicator& c) {
    set_num_threads(1);
    const Blend data = t.blend();
    Trainer trainer(config, data, &c);
    trainer.initialize();
    first.add(trainer.content());
    StepMetrics m;
    for (int64_t i = 0; i < steps; ++i) m = trainer.step();
    trainer.verify_replicas();
    last.add(trainer.content());
    const std::scoped_lock lock(mutex);
    outcome.loss = m.loss;
    outcome.norm = m.grad_norm;
  });
  outcome.first = first.tensors();
  outcome.last = last.tensors();
  return outcome;
}

/// A model with what can be frozen, and rules that leave some of every kind to train.
struct Freezing : TinyTraining {
  explicit Freezing(Precision precision = Precision::f32, bool experts = false) : TinyTraining(precision) {
    config.train.micro_batch_size = 1;
    config.train.global_batch_size = 8;
    config.data.validation.clear();
    config.parallel.timeout_seconds = 60;
    if (experts) {
      add_experts();
      config.model.moe.load_balance.scope = BalanceScope::micro_batch;
    }
    config.optimizer.rules = {freeze("embed_tokens"),
                              freeze("layers.0."),
                              freeze("norm"),
                              freeze(".experts."),
                              thaw("layers.0.self_attn.q_proj"),
                              thaw("model.norm")};
    if (!experts) config.optimizer.rules.erase(config.optimizer.rules.begin() + 3);
  }
};

bool is_frozen(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (has("layers.0.self_attn.q_proj") || has("model.norm")) return false;
  return has("embed_tokens") || has("layers.0.") || has("norm") || has(".experts.");
}

}  // namespace

TEST_CASE("frozen weights keep every bit and have no moments; the others are trained", "[freeze]") {
  const OneThread one_thread;
  for (const Precision precision : {Precision::f32, Precision::bf16, Precision::f64})
    for (const OptimizerType type : {OptimizerType::adamw, OptimizerType::muon})
      for (const bool experts : {false, true}) {
        Freezing t(precision, experts);
        t.config.optimizer.type = type;
        t.config.optimizer.weight_decay = 0.1;
        t.config.train.recompute = experts ? Recompute::mlp : Recompute::block;
        const Outcome out = train(t.config, t, 1, 4);
        int64_t frozen = 0, trained = 0;
        for (const auto& [name, bytes] : out.last) {
          INFO(name);
          const bool moment = name.ends_with(".m") || name.ends_with(".v") || name.ends_with(".master");
          if (moment) {
            CHECK_FALSE(is_frozen(name));
            continue;
          }
          const bool same = bytes == out.first.at(name);
          CHECK(same == is_frozen(name));
          CHECK(out.last.contains(name + ".m") != is_frozen(name));
          (is_frozen(name) ? frozen : trained) += 1;
        }
        CHECK(frozen > 8);
        CHECK(trained > 6);
      }
}

TEST_CASE("the gradient norm covers only trained parameters", "[freeze]") {
  const OneThread one_thread;
  Freezing t(Precision::f64);
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  const double norm = trainer.step().grad_norm;
  double squares = 0;
  for (ParamStore::Id id = 0; id < static_cast<ParamStore::Id>(trainer.store().specs().size()); ++id) {
    if (!trainer.store().trains(id)) continue;
    const Tensor g = trainer.store().grad(id);
    for (int64_t i = 0; i < g.numel(); ++i) squares += Pool::get(g, i) * Pool::get(g, i);
  }
  CHECK(norm == Approx(std::sqrt(squares)).epsilon(1e-12));
}

TEST_CASE("A run with frozen parameters resumes bit for bit, and from its weights under other rules",
          "[freeze]") {
  const OneThread one_thread;
  for (const int64_t stage : {0, 3}) {
    Freezing t(Precision::bf16, true);
    t.config.model.vocab_size = 257;  // of the tokenizer that a checkpoint's configuration names
    t.config.parallel.zero_stage = stage;
    const Blend data = t.blend();
    Trainer trainer(t.config, data);
    trainer.initialize();
    for (int i = 0; i < 3; ++i) trainer.step();
    const std::string saved = save_checkpoint(t.config.run_dir + "/ckpt", trainer, t.config);
    const std::map<std::string, std::string> at_save = bits_of(trainer);
    for (int i = 0; i < 3; ++i) trainer.step();

    Trainer resumed(t.config, data);
    resumed.restore(verify_checkpoint(saved));
    for (int i = 0; i < 3; ++i) resumed.step();
    const bool same = bits_of(resumed) == bits_of(trainer);
    CHECK(same);

    // What was frozen has no moments, and other rules want some.
    Config other = t.config;
    other.optimizer.rules = {freeze("layers.0.")};
    Trainer thawed(other, data);
    CHECK_THROWS_WITH(thawed.restore(verify_checkpoint(saved)),
                      Catch::Contains("model.embed_tokens.weight is there without moments: it was frozen") &&
                          Catch::Contains("train.init_from"));
    other.train.init_from = saved;
    Trainer fresh(other, data);
    fresh.initialize();
    const std::map<std::string, std::string> loaded = bits_of(fresh);
    for (const auto& [name, bytes] : loaded) {
      INFO(name);
      if (!name.ends_with(".m") && !name.ends_with(".v") && !name.ends_with(".master"))
        CHECK((bytes == at_save.at(name)));
    }
    CHECK(std::isfinite(fresh.step().loss));
  }
}

TEST_CASE("two ranks have the bits of one for any ZeRO stage and expert-parallel size", "[freeze][ranks]") {
  const OneThread one_thread;
  for (const bool experts : {false, true}) {
    Freezing t(Precision::f32, experts);
    t.config.parallel.determinism = Determinism::exact;
    const Outcome one = train(t.config, t, 1, 3);
    for (const int64_t stage : {0, 1, 2, 3})
      for (const int64_t expert : {1, 2}) {
        if (expert > 1 && !experts) continue;
        INFO("zero_stage " << stage << ", expert " << expert << (experts ? ", experts" : ""));
        Config config = t.config;
        config.parallel.zero_stage = stage;
        config.parallel.expert = expert;
        config.parallel.verify_every_steps = 1;
        const Outcome two = train(config, t, 2, 3);
        CHECK(two.loss == one.loss);
        CHECK(two.norm == one.norm);
        const bool same_start = two.first == one.first, same_end = two.last == one.last;
        CHECK(same_start);
        CHECK(same_end);
      }
  }
}

TEST_CASE("A plan counts no gradients, moments and weight products of what is frozen", "[freeze][plan]") {
  const OneThread one_thread;
  Freezing t(Precision::bf16, true);
  const Plan plan = make_plan(t.config);
  int64_t trained = 0, frozen_in_products = 0;
  double in_products = 0;
  for (const Plan::Parameter& p : plan.parameters) {
    CHECK(p.trained != is_frozen(p.name));
    if (p.trained) trained += p.count;
    if (!p.trained && p.in_product) in_products += static_cast<double>(p.count) * p.active;
  }
  frozen_in_products = std::llround(in_products);
  CHECK(plan.trained == trained);
  CHECK(plan.trained < plan.total / 2);
  const std::string text = plan_text(plan);
  CHECK_THAT(text, Catch::Contains("the rest is frozen (optimizer.rules)") && Catch::Contains("  frozen\n") &&
                       Catch::Contains("(4 x "));
  Config config = t.config;
  config.optimizer.rules.clear();
  const Plan whole = make_plan(config);
  CHECK(whole.trained == whole.total);
  CHECK(whole.total == plan.total);
  CHECK(whole.flops_per_token - plan.flops_per_token ==
        Approx(2.0 * static_cast<double>(frozen_in_products)));
  // 4 bytes of gradient; 4 each of m, v and master.
  const int64_t frozen = plan.total - plan.trained;
  CHECK(plan.memory.gradients < whole.memory.gradients - 3 * frozen);
  CHECK(plan.memory.optimizer < whole.memory.optimizer - 11 * frozen);
  CHECK(plan.memory.parameters <= whole.memory.parameters + 4096);
  CHECK_THROWS_WITH(scale_model(plan), Catch::Contains("optimizer.rules freeze"));
}
