// Training a mixture of experts: routers' totals, their reports, and a collapsing router.
#include <catch2/catch.hpp>
#include <cmath>

#include "ops/router.h"
#include "run/router_monitor.h"
#include "support/model.h"
#include "support/tiny_training.h"

using namespace sluice;
using namespace sluice::test;

namespace {

ParamStore::Id id_of(const ParamStore& store, const std::string& name) {
  for (size_t i = 0; i < store.specs().size(); ++i)
    if (store.specs()[i].name == name) return static_cast<ParamStore::Id>(i);
  FAIL("no parameter " << name);
  return 0;
}

}  // namespace

TEST_CASE("a step counts every token of its global batch exactly once, with any recomputation",
          "[moe][trainer]") {
  const OneThread one_thread;
  for (const Recompute recompute : {Recompute::none, Recompute::block}) {
    TinyTraining t;
    t.add_experts();
    t.config.train.recompute = recompute;
    const Blend data = t.blend();
    Trainer trainer(t.config, data);
    trainer.initialize();
    for (int step = 0; step < 2; ++step) {
      trainer.step();
      const Tensor totals = trainer.step_loss<RouterBalanceState>().totals();
      REQUIRE(totals.has_shape({2, router_totals_size(6)}));
      for (int64_t i = 0; i < router_totals_size(6); ++i)
        CHECK(Pool::get(totals, i) == 0);  // the dense layer
      const double* row = totals.as<double>() + router_totals_size(6);
      double pairs = 0, probability = 0;
      for (int64_t e = 0; e < 6; ++e) {
        pairs += row[e];
        probability += row[6 + e];
      }
      CHECK(pairs == 4 * 32 * 2);
      CHECK(probability == Approx(4 * 32).epsilon(1e-6));
      CHECK(row[14] == 4 * 32);
    }
  }
}

TEST_CASE("the balance loss of the global batch does not depend on the micro-batches", "[moe][trainer]") {
  const OneThread one_thread;
  std::vector<double> global, local;
  for (const int64_t micro : {1, 2, 4}) {
    TinyTraining t(Precision::f64);
    t.add_experts();
    t.config.train.micro_batch_size = micro;
    const Blend data = t.blend();
    Trainer trainer(t.config, data);
    trainer.initialize();
    trainer.step();
    global.push_back(
        summarize_router(t.config.model, trainer.step_loss<RouterBalanceState>().totals())->balance_loss);
    t.config.model.moe.load_balance.scope = BalanceScope::micro_batch;
    local.push_back(
        summarize_router(t.config.model, trainer.step_loss<RouterBalanceState>().totals())->balance_loss);
  }
  CHECK(global[0] == Approx(global[2]).epsilon(1e-12));
  CHECK(global[1] == Approx(global[2]).epsilon(1e-12));
  // Over smaller batches the loss is stricter, which is why the global scope lets experts specialise.
  CHECK(local[2] == Approx(global[2]).epsilon(1e-12));
  CHECK(local[0] > local[1]);
  CHECK(local[1] > local[2]);
}

TEST_CASE("the summary of a step's routers agrees with their totals", "[moe][summary]") {
  ModelConfig model;
  model.num_hidden_layers = 3;
  model.moe.num_experts = 4;
  model.moe.num_experts_per_tok = 2;
  model.moe.decoder_sparse_step = 2;  // layer 1 alone
  const int64_t width = router_totals_size(4);
  std::vector<double> totals(static_cast<size_t>(3 * width), 0.0);
  const Tensor view(totals.data(), DType::f64, {3, width});
  CHECK_FALSE(summarize_router(model, view));
  CHECK_FALSE(summarize_router(model, Tensor()));
  // 10 tokens: 6, 10, 4 and 0 pairs; probabilities 0.25 each.
  const double row[] = {6, 10, 4, 0, 2.5, 2.5, 2.5, 2.5, 13, 40, 10};
  std::copy(std::begin(row), std::end(row), totals.begin() + width);
  const auto summary = summarize_router(model, view);
  REQUIRE(summary);
  REQUIRE(summary->layers.size() == 1);
  const LayerLoad& load = summary->layers[0];
  CHECK(load.layer == 1);
  CHECK(load.max_over_mean == Approx(2.0));
  CHECK(load.idle == 1);
  CHECK(load.variation == Approx(std::sqrt((36 + 100 + 16) / 4.0 - 25) / 5));
  CHECK(load.entropy ==
        Approx(-(0.3 * std::log(0.3) + 0.5 * std::log(0.5) + 0.2 * std::log(0.2)) / std::log(4)));
  CHECK(load.balance_loss == Approx(1.0));
  CHECK(load.z_loss == Approx(4.0));
  CHECK(load.counts == std::vector<int64_t>{6, 10, 4, 0});
  model.moe.load_balance.scope = BalanceScope::micro_batch;
  CHECK(summarize_router(model, view)->balance_loss == Approx(1.3));
}

TEST_CASE(
    "a collapsed router is reported within 20 steps and again later, and training continues within the "
    "planned memory",
    "[moe][monitor]") {
  const OneThread one_thread;
  TinyTraining t;
  t.add_experts();
  t.config.train.max_steps = 40;
  const Blend data = t.blend();
  Trainer trainer(t.config, data);
  trainer.initialize();
  RouterMonitor monitor(t.config.model);
  const Tensor router = trainer.store().value(id_of(trainer.store(), "model.layers.1.mlp.gate.weight"));
  int warned_at = 0;
  std::string warning;
  for (int step = 1; step <= 25; ++step) {
    // A uniform router: ties go to the lower indices, so experts 0 and 1 receive all tokens.
    for (int64_t i = 0; i < router.numel(); ++i) Pool::set(router, i, 0);
    trainer.store().pack(trainer.context());
    const StepMetrics m = trainer.step();
    CHECK(std::isfinite(m.loss));
    const auto summary = summarize_router(t.config.model, trainer.step_loss<RouterBalanceState>().totals());
    REQUIRE(summary);
    CHECK(summary->max_over_mean == Approx(3.0));
    CHECK(summary->idle == 4);
    for (const std::string& line : monitor.add(step, *summary))
      if (warned_at == 0) warned_at = step, warning = line;
  }
  CHECK(warned_at == 20);
  CHECK(warning ==
        "router of layer 1: max/mean load 3.0 for 20 steps (model.moe.load_balance: coefficient 0.01, scope "
        "global_batch); "
        "consider a larger coefficient or a lower learning rate");
}

TEST_CASE("idle experts are reported after 100 steps, also across a resumption", "[moe][monitor]") {
  ModelConfig model;
  model.num_hidden_layers = 1;
  model.moe.num_experts = 64;
  model.moe.load_balance.coefficient = 1e-4;
  RouterSummary summary;
  summary.layers.emplace_back();
  summary.layers[0].counts.assign(64, 10);
  for (const size_t idle : {3, 9, 20}) summary.layers[0].counts[idle] = 0;
  summary.layers[0].max_over_mean = 1.1;

  RouterMonitor monitor(model);
  for (int64_t step = 1; step <= 60; ++step) CHECK(monitor.add(step, summary).empty());
  RouterMonitor resumed(model);
  const auto restore = [](RouterMonitor& to, const RouterMonitor& from) {
    nlohmann::json state;
    from.save(state);
    state = nlohmann::json::parse(state.dump());
    to.restore(StateReader(state, "state.json"));
  };
  restore(resumed, monitor);
  for (int64_t step = 61; step < 100; ++step) CHECK(resumed.add(step, summary).empty());
  const auto warnings = resumed.add(100, summary);
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0] ==
        "router of layer 0: 3 of 64 experts received no tokens for 100 steps, max/mean load 1.1 "
        "(model.moe.load_balance: "
        "coefficient 0.0001, scope global_batch); consider coefficient 1e-2");
  for (int64_t step = 101; step < 1100; ++step) CHECK(resumed.add(step, summary).empty());
  CHECK(resumed.add(1100, summary).size() == 1);
  // One token ends an expert's idle time; the state of another model is refused.
  summary.layers[0].counts.assign(64, 10);
  CHECK(resumed.add(2200, summary).empty());
  model.moe.num_experts = 32;
  RouterMonitor other(model);
  restore(other, resumed);
  nlohmann::json state;
  other.save(state);
  CHECK(state["router"]["layers"][0]["counts"].size() == 32);
}
