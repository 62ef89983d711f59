// Training with a z-loss on the output logits: what it is, that it does not depend on how ranks and
// micro-batches share the batch, and that it holds the logits.
#include <catch2/catch.hpp>
#include <cmath>
#include <mutex>

#include "comm/threads.h"
#include "support/model.h"
#include "support/tiny_training.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Outcome {
  std::vector<double> weights, z, losses;  // z and loss of every step
};

std::vector<double> weights_of(Trainer& trainer) {
  std::vector<double> all;
  const ParamStore& store = trainer.store();
  for (size_t i = 0; i < store.specs().size(); ++i) {
    const Tensor value = store.value(static_cast<ParamStore::Id>(i));
    for (int64_t j = 0; j < value.numel(); ++j) all.push_back(Pool::get(value, j));
  }
  return all;
}

Outcome train(const TinyTraining& t, double coefficient, int ranks = 1, int64_t micro_batch = 4,
              int64_t steps = 4) {
  Config config = t.config;
  config.model.logit_z_loss_coefficient = coefficient;
  config.train.micro_batch_size = micro_batch;
  config.data.validation.clear();
  std::vector<Outcome> outcomes(static_cast<size_t>(ranks));
  run_thread_ranks(ranks, [&](Communicator& c) {
    set_num_threads(1);
    const Blend data = t.blend();
    Trainer trainer(config, data, &c);
    trainer.initialize();
    Outcome& mine = outcomes[static_cast<size_t>(c.rank())];
    for (int64_t i = 0; i < steps; ++i) {
      mine.losses.push_back(trainer.step().loss);
      for (const StepScalar& scalar : trainer.scalars())
        if (scalar.name == "logit_z_loss") mine.z.push_back(scalar.value);
    }
    mine.weights = weights_of(trainer);
  });
  for (const Outcome& other : outcomes) {
    CHECK(other.weights == outcomes[0].weights);
    CHECK(other.z == outcomes[0].z);
  }
  return outcomes[0];
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

}  // namespace

TEST_CASE("the z-loss of a step is one of its global batch, however ranks and micro-batches share it",
          "[logit_z_loss][ranks]") {
  const OneThread one_thread;
  TinyTraining t(Precision::f64);
  const Outcome whole = train(t, 0.1);
  REQUIRE(whole.z.size() == 4);
  // Untrained logits are near zero: their log-sum-exp is the logarithm of the vocabulary.
  CHECK(whole.z[0] ==
        Approx(std::pow(std::log(static_cast<double>(t.config.model.vocab_size)), 2)).epsilon(0.05));
  for (const auto& [ranks, micro_batch] :
       {std::pair(1, 1), std::pair(1, 2), std::pair(2, 2), std::pair(2, 1)}) {
    INFO(ranks << " ranks, micro-batches of " << micro_batch);
    const Outcome shared = train(t, 0.1, ranks, micro_batch);
    CHECK(largest_difference(whole.weights, shared.weights) < 1e-10);
    CHECK(largest_difference(whole.z, shared.z) < 1e-10);
  }
  CHECK(largest_difference(whole.weights, train(t, 0.0).weights) > 1e-6);
}

TEST_CASE("exact training with a z-loss has the same bits on one rank and on two", "[logit_z_loss][ranks]") {
  const OneThread one_thread;
  TinyTraining t;
  t.config.parallel.determinism = Determinism::exact;
  const Outcome one = train(t, 0.1, 1, 1), two = train(t, 0.1, 2, 1);
  CHECK(one.weights == two.weights);
  CHECK(one.z == two.z);
}

TEST_CASE("a z-loss keeps the log-sum-exp small, is no part of the loss, and is nothing with coefficient 0",
          "[logit_z_loss]") {
  const OneThread one_thread;
  TinyTraining t;
  const Outcome none = train(t, 0.0, 1, 2, 30), little = train(t, 1e-12, 1, 2, 30),
                much = train(t, 1.0, 1, 2, 30);
  CHECK(none.z.empty());
  CHECK(little.losses[0] == none.losses[0]);
  CHECK(much.losses[0] == none.losses[0]);  // of the same weights, whatever the coefficient
  CHECK(largest_difference(little.losses, none.losses) < 1e-3);
  INFO("from " << little.z.front() << " to " << little.z.back() << ", with coefficient 1 to "
               << much.z.back());
  CHECK(little.z.back() > little.z.front());
  CHECK(much.z.back() < 0.85 * much.z.front());
}
