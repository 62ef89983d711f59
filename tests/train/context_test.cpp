// Training with sequences that several ranks share (parallel.context) equals training without.
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <mutex>
#include <tuple>

#include "comm/threads.h"
#include "core/parallel_for.h"
#include "support/enums.h"
#include "support/ragged_training.h"
#include "support/steps.h"

using namespace sluice;
using namespace sluice::test;
using Catch::Contains;

namespace {

using Training = RaggedTraining;

struct Layout {
  int ranks = 1;
  int64_t context = 1, zero_stage = 0, expert = 1;
};
std::string describe(const Layout& l) {
  return fmt::format("{} ranks, context {}, stage {}, experts on {}", l.ranks, l.context, l.zero_stage,
                     l.expert);
}

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<std::pair<std::string, std::vector<double>>> gradients;  // of the last step, with ZeRO 0
  std::map<std::string, double> scalars;
};

Config on(const Layout& layout, Config config) {
  config.parallel.context = layout.context;
  config.parallel.zero_stage = layout.zero_stage;
  config.parallel.expert = layout.expert;
  return config;
}

/// Trains, and checks that all ranks report the same.
Outcome train(const Training& t, const Layout& layout, int64_t steps = 1) {
  Outcome outcome;
  std::mutex mutex;
  const Config config = on(layout, t.config);
  run_thread_ranks(layout.ranks, [&](Communicator& c) {
    set_num_threads(1);
    const Blend data = t.blend();
    Trainer trainer(config, data, &c);
    trainer.initialize();
    Outcome mine;
    std::tie(mine.losses, mine.norms) = take_steps(trainer, steps);
    const ParamStore& store = trainer.store();
    for (size_t i = 0; i < store.specs().size() && layout.zero_stage == 0 && layout.expert == 1; ++i) {
      auto& [name, values] = mine.gradients.emplace_back(store.specs()[i].name, std::vector<double>());
      const Tensor gradient = store.grad(static_cast<ParamStore::Id>(i));
      for (int64_t j = 0; j < gradient.numel(); ++j) values.push_back(Pool::get(gradient, j));
    }
    for (const StepScalar& s : trainer.scalars()) mine.scalars[s.name + std::to_string(s.layer)] = s.value;
    const std::scoped_lock lock(mutex);
    if (outcome.losses.empty()) outcome = mine;
    if (outcome.losses != mine.losses || outcome.norms != mine.norms || outcome.gradients != mine.gradients)
      throw std::runtime_error("ranks disagree");
  });
  return outcome;
}

void check_same(const Outcome& one, const Outcome& shared, double tolerance) {
  for (size_t i = 0; i < one.losses.size(); ++i) {
    CHECK(shared.losses[i] == Approx(one.losses[i]).epsilon(tolerance));
    CHECK(shared.norms[i] == Approx(one.norms[i]).epsilon(tolerance));
  }
  for (const auto& [name, value] : one.scalars)
    CHECK(shared.scalars.at(name) == Approx(value).epsilon(tolerance).margin(tolerance));
  for (size_t p = 0; p < shared.gradients.size(); ++p) {
    const auto& [name, expected] = one.gradients[p];
    double difference = 0, size = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      difference += std::pow(shared.gradients[p].second[i] - expected[i], 2);
      size += expected[i] * expected[i];
    }
    INFO(name);
    // The terms of an indexer's bias cancel each other almost.
    CHECK(std::sqrt(difference) <= tolerance * std::sqrt(size) + 1e-17);
  }
}

/// One step in f64 on one rank, and on 2 and 4 that share sequences: losses and gradients at 1e-12.
void check_gradients(const Training& t) {
  const Outcome one = train(t, {});
  REQUIRE(one.norms[0] > 0);
  check_same(one, train(t, {.ranks = 2, .context = 2}), 1e-12);
  check_same(one, train(t, {.ranks = 4, .context = 4}), 1e-12);
}

}  // namespace

TEST_CASE("gradients through shared sequences: every kind of attention", "[context]") {
  for_each_value<AttentionKind>([&](AttentionKind kind) {
    INFO(name_of(kind));
    Training t;
    t.config.model.attention.kind = kind;
    check_gradients(t);
  });
}

TEST_CASE("gradients through shared sequences: selected keys, and the indexer's loss", "[context][sparse]") {
  Training t;
  use_sparse_attention(t.config);
  SparseConfig& s = t.config.model.attention.sparse;
  SECTION("keys") {}
  SECTION("keys, without documents") { t.config.data.document_mask = false; }
  SECTION("several samples") { t.config.train.micro_batch_size = 4; }
  SECTION("a set of keys for each key/value head, the own one forced") {
    s.scope = IndexScope::kv_head;
    s.force_self = true;
  }
  SECTION("blocks that begin on one rank and end on another") {
    s.block = 3;
    s.k = {.policy = BudgetPolicy::fixed, .base = 2, .min = 1, .max = 2};
  }
  SECTION("blocks of normalised index keys") {
    s.block = 3;
    s.indexer.key_norm = true;
    t.config.data.document_mask = false;
  }
  SECTION("an indexer that is not detached, and a sink") {
    s.indexer.detach_input = false;
    s.sink = true;
  }
  SECTION("the dense warm-up") { s.phase = SparsePhase::dense_warm_up; }
  SECTION("the dense warm-up, of blocks") {
    s.phase = SparsePhase::dense_warm_up;
    s.block = 3;
  }
  SECTION("recomputed blocks") { t.config.train.recompute = Recompute::block; }
  check_gradients(t);
}

TEST_CASE("gradients through shared sequences: every policy of the number of selected keys",
          "[context][sparse]") {
  for_each_value<BudgetPolicy>([&](BudgetPolicy policy) {
    INFO(name_of(policy));
    Training t;
    use_sparse_attention(t.config);
    t.config.model.attention.sparse.k.policy = policy;
    // The running mean of the variance adapts k from the second step on.
    const Outcome one = train(t, {}, 3);
    check_same(one, train(t, {.ranks = 2, .context = 2}, 3), 1e-9);
    check_same(one, train(t, {.ranks = 4, .context = 2, .zero_stage = 2}, 3), 1e-9);
  });
}

TEST_CASE("gradients through shared sequences: every position of a gate", "[context]") {
  for_each_value<GatePosition>([&](GatePosition position) {
    INFO(name_of(position));
    Training t;
    t.config.model.attention.gates = {{.position = position}};
    t.config.model.attention.kind = AttentionKind::sink;
    check_gradients(t);
  });
}

TEST_CASE("gradients through shared sequences: windows, positions, packing, begin token, norms",
          "[context]") {
  Training t;
  SECTION("without documents") { t.config.data.document_mask = false; }
  SECTION("positions of documents") { t.config.data.document_positions = true; }
  SECTION("packed documents") {
    t.config.data.packing = Packing::documents;
    t.config.data.document_positions = true;
  }
  SECTION("a begin token") { t.config.data.begin_token = 31; }
  SECTION("a window") {
    t.config.model.attention.window = 5;
    t.config.data.document_mask = false;
  }
  SECTION("several samples") { t.config.train.micro_batch_size = 4; }
  SECTION("exclusive attention, norm of the output") {
    t.config.model.attention.exclusive = ExclusiveAttention::full;
    t.config.model.attention.output_norm = OutputNorm::rmsnorm;
  }
  SECTION("recomputed MLPs") { t.config.train.recompute = Recompute::mlp; }
  SECTION("recomputed blocks") { t.config.train.recompute = Recompute::block; }
  SECTION("a z-loss") { t.config.model.logit_z_loss_coefficient = 1e-2; }
  check_gradients(t);
}

TEST_CASE("gradients through shared sequences: balance of heads in every scope", "[context]") {
  for_each_value<HeadBalanceScope>([&](HeadBalanceScope scope) {
    for (const AttentionKind kind : {AttentionKind::softmax, AttentionKind::sink}) {
      INFO(name_of(scope) << " " << name_of(kind));
      Training t;
      t.config.model.attention.gates.clear();
      t.config.model.attention.kind = kind;
      t.config.model.attention.head_balance.coefficient = 0.5;
      t.config.model.attention.head_balance.scope = scope;
      // The same micro-batches at the same time, so that all scopes see the same.
      const Outcome one = train(t, {}, 2), two = train(t, {.ranks = 2, .context = 2}, 2);
      check_same(one, two, 1e-9);
    }
  });
}

TEST_CASE("training with shared sequences, data parallelism and ZeRO agrees with one rank's",
          "[context][zero]") {
  const bool sparse = GENERATE(false, true);
  Training t(Precision::f32);
  if (sparse) use_sparse_attention(t.config);
  t.config.train.micro_batch_size = 1;
  const Outcome one = train(t, {}, 4);
  CHECK(one.losses.back() < one.losses.front());
  for (const Layout& layout :
       {Layout{2, 2, 1}, Layout{4, 2, 0}, Layout{4, 2, 1}, Layout{4, 2, 2}, Layout{4, 2, 3}, Layout{4, 4, 0},
        Layout{4, 4, 1}, Layout{4, 4, 2}, Layout{4, 4, 3}}) {
    INFO(describe(layout));
    const Outcome shared = train(t, layout, 4);
    CHECK(train(t, layout, 4).losses == shared.losses);
    for (size_t i = 0; i < one.losses.size(); ++i)
      CHECK(shared.losses[i] == Approx(one.losses[i]).epsilon(1e-5));
  }
}

TEST_CASE("training with shared sequences in bf16, and with Muon", "[context][muon]") {
  Training t(Precision::bf16);
  double tolerance = 0.02;
  SECTION("bf16") {}
  SECTION("bf16, selected keys") { use_sparse_attention(t.config); }
  SECTION("Muon") {
    t.config.train.precision = Precision::f32;
    t.config.optimizer.type = OptimizerType::muon;
    tolerance = 1e-4;
  }
  const Outcome one = train(t, {}, 3), two = train(t, {.ranks = 4, .context = 2}, 3);
  for (size_t i = 0; i < one.losses.size(); ++i)
    CHECK(two.losses[i] == Approx(one.losses[i]).epsilon(tolerance));
}

TEST_CASE("gradients through shared sequences: experts, in every scope of their balance", "[context][moe]") {
  for_each_value<BalanceScope>([&](BalanceScope scope) {
    for (const Recompute recompute : {Recompute::none, Recompute::block}) {
      INFO(name_of(scope) << " " << name_of(recompute));
      Training t;
      t.add_experts();
      t.config.model.moe.num_experts = 8;
      t.config.model.moe.load_balance = {.coefficient = 0.5, .scope = scope};
      t.config.model.moe.router_z_loss_coefficient = 0.01;
      t.config.train.recompute = recompute;
      const Outcome one = train(t, {}, 2);
      check_same(one, train(t, {.ranks = 2, .context = 2}, 2), 1e-9);
      check_same(one, train(t, {.ranks = 2, .context = 2, .expert = 2}, 2), 1e-9);
      check_same(one, train(t, {.ranks = 4, .context = 4, .zero_stage = 3, .expert = 2}, 2), 1e-9);
    }
  });
}

TEST_CASE("a training goes on with sequences on another number of ranks", "[context][checkpoint]") {
  Training t;
  SECTION("plain attention") {}
  SECTION("an indexer behind its warm-up") {
    use_sparse_attention(t.config);
    t.config.model.attention.sparse.phase_steps = 2;
  }
  SECTION("heads in balance with those of the step before") {
    t.config.model.attention.head_balance = {.coefficient = 0.5, .scope = HeadBalanceScope::previous_step};
    t.config.model.attention.gates[0].granularity = GateGranularity::headwise;
  }
  const Outcome one = train(t, {}, 6);
  for (const auto& [first, second] : {std::pair<Layout, Layout>{{2, 2, 1}, {1, 1, 0}},
                                      {{1, 1, 0}, {4, 4, 3}},
                                      {{4, 2, 2}, {2, 2, 0}},
                                      {{4, 4, 1}, {2, 2, 2}},
                                      {{4, 4, 3}, {1, 1, 0}}}) {
    INFO(describe(first) << ", then " << describe(second));
    const std::string folder =
        t.folder / fmt::format("ckpt{}{}{}", first.ranks, second.ranks, first.zero_stage);
    std::vector<double> losses(6);
    for (const Layout& layout : {first, second})
      run_thread_ranks(layout.ranks, [&](Communicator& c) {
        set_num_threads(1);
        const bool begins = &layout != &second && !std::filesystem::exists(folder);
        c.barrier();
        const Config config = on(layout, t.config);
        const Blend data = t.blend();
        Trainer trainer(config, data, &c);
        if (begins)
          trainer.initialize();
        else
          trainer.restore(newest_valid_checkpoint(folder));
        for (int i = 0; i < 3; ++i) {
          const double loss = trainer.step().loss;
          if (c.rank() == 0) losses[static_cast<size_t>(trainer.next_step() - 1)] = loss;
        }
        if (!begins) return;
        CheckpointStore store(folder, config.checkpoint, trainer.content(), &trainer.context(),
                              &trainer.ranks());
        store.save(trainer.content());
        if (!store.wait()) throw std::runtime_error("not saved");
      });
    for (size_t i = 0; i < 6; ++i) CHECK(losses[i] == Approx(one.losses[i]).epsilon(1e-9));
  }
}

TEST_CASE(
    "memory with shared sequences: planned without ranks as they take it, and activations fall as 1 / N",
    "[context]") {
  const int64_t block = GENERATE(0, 1, 4);  // 0: softmax
  Training t(Precision::f32);
  if (block > 0) {
    use_sparse_attention(t.config);
    t.config.model.attention.sparse.block = block;
  }
  t.config.data.seq_len = 256;
  const MemoryPlan one = Trainer::measure(t.config);
  for (const Layout& layout : {Layout{2, 2, 0}, Layout{4, 4, 3}}) {
    INFO(describe(layout));
    const Config config = on(layout, t.config);
    const auto dry = make_dry_communicator(0, layout.ranks);
    const MemoryPlan plan = Trainer::measure(config, dry.get());
    CHECK(static_cast<double>(plan.activations * layout.context) ==
          Approx(static_cast<double>(one.activations)).epsilon(0.01));
    run_thread_ranks(layout.ranks, [&](Communicator& c) {
      const Blend data = t.blend();
      Trainer trainer(config, data, &c);
      trainer.initialize();
      trainer.step();
      const MemoryPlan& taken = trainer.memory();
      const auto figures = [](const MemoryPlan& m) {
        return std::vector<int64_t>{m.parameters,  m.gradients, m.optimizer,
                                    m.activations, m.batch,     m.scratch};
      };
      // With ZeRO 3 ranks write parts of different sizes into a checkpoint; the first is planned.
      if (c.rank() == 0 && figures(taken) != figures(plan)) throw std::runtime_error("another plan");
      if (trainer.context().scratch.high_water() != plan.scratch)
        throw std::runtime_error("other scratch memory");
    });
  }
}
