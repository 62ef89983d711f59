// The step's sums of the indexers, and the running mean of the variance of their scores.
#include "nn/indexer_loss.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "checkpoint/state_reader.h"
#include "comm/communicator.h"
#include "nn/step_losses.h"
#include "support/gradcheck.h"

namespace sluice {
namespace {

static_assert(StepLoss<IndexerLossState, StepLoad>);

struct State {
  Config config;
  Arena memory{"memory", 1 << 16}, host{"host", 1 << 16};
  std::vector<Tensor> means;
  test::Pool pool;
  std::unique_ptr<Communicator> ranks = make_local_communicator();
  std::unique_ptr<IndexerLossState> loss;
  Context ctx{1 << 16};

  explicit State(DType dtype = DType::f32) {
    config.model.attention.kind = AttentionKind::sparse;
    config.model.attention.sparse.k.policy = BudgetPolicy::inverse;
    config.model.attention.sparse.k.momentum = 0.75;
    config.model.num_hidden_layers = 2;
    for (int l = 0; l < 2; ++l) means.push_back(pool.zeros(dtype, {1}));
    loss = std::make_unique<IndexerLossState>(config);
    loss->allocate({.device = memory,
                    .host = host,
                    .ranks = *ranks,
                    .sequences = nullptr,
                    .micro_batches = 2,
                    .tokens = 4,
                    .losses = DType::f32,
                    .index_variances = means});
  }
  /// A step whose layers have these means of the variance over 4 queries in two micro-batches.
  void step(double first, double second) {
    loss->begin_step(ctx);
    StepLoad load;
    loss->add_to(load);
    for (int64_t m = 0; m < 2; ++m) {
      for (int64_t l = 0; l < 2; ++l) {
        double* const row = load.indexers.row(l).as<double>();
        row[kIndexVariance] += 2 * (l == 0 ? first : second);
        row[kIndexQueries] += 2;
        row[kIndexSelected] += 10 + 4 * static_cast<double>(m);
        row[kIndexSquares] += 50 + 48 * static_cast<double>(m);
        row[kIndexLoss] += 3;
        row[kIndexCounted] += 2;
      }
      loss->end_micro_batch(ctx, m);
    }
    loss->fetch(ctx);
    loss->collect(*ranks, 4);
  }
};

}  // namespace

TEST_CASE("the running mean begins with the first step's and then moves by its momentum", "[indexer]") {
  State s;
  s.step(2, 8);
  CHECK(s.loss->mean_variance()[0] == 0);  // not applied
  s.loss->applied(s.ctx);
  CHECK(s.loss->mean_variance() == std::vector<double>{2, 8});
  s.step(4, 0);
  s.loss->applied(s.ctx);
  CHECK(s.loss->mean_variance() == std::vector<double>{2.5, 6});
  CHECK(*s.means[0].as<float>() == 2.5f);
  CHECK(*s.means[1].as<float>() == 6.0f);
  s.step(100, 100);  // a step that is skipped
  CHECK(s.loss->mean_variance() == std::vector<double>{2.5, 6});
}

TEST_CASE("the running mean is read and published in the type of the weights", "[indexer]") {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    State s(dtype);
    test::Pool::set(s.means[1], 0, 3);  // of the weights that the training started from
    s.step(2, 5);
    s.loss->applied(s.ctx);
    CHECK(s.loss->mean_variance() == std::vector<double>{2, 3.5});
    CHECK(test::Pool::get(s.means[0], 0) == 2);
    CHECK(test::Pool::get(s.means[1], 0) == 3.5);
  }
}

TEST_CASE("the indexers' numbers of a step: loss, selected keys and their spread", "[indexer]") {
  State s;
  s.step(2, 8);
  double kl = 0, k = 0, spread = 0;
  for (const StepScalar& scalar : s.loss->scalars()) {
    if (scalar.name == "indexer/kl" && scalar.layer < 0) kl = scalar.value;
    if (scalar.name == "indexer/mean_k" && scalar.layer == 1) k = scalar.value;
    if (scalar.name == "indexer/deviation_k" && scalar.layer == 1) spread = scalar.value;
  }
  CHECK(kl == 1.5);
  CHECK(k == 6);  // 24 keys of 4 queries
  CHECK(spread == Approx(std::sqrt(148.0 / 4 - 36)));
}

TEST_CASE("the running mean is restored from a checkpoint, or begins with that of the weights", "[indexer]") {
  State a, b, c;
  a.step(1.1, 2.3);
  a.loss->applied(a.ctx);
  nlohmann::json state;
  a.loss->save(state);
  b.loss->restore(StateReader(state, "state.json"));
  CHECK(b.loss->mean_variance() == a.loss->mean_variance());
  *c.means[0].as<float>() = 5;
  c.step(0, 0);
  CHECK(c.loss->mean_variance() == std::vector<double>{5, 0});
}

}  // namespace sluice
