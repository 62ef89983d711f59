// What follows from configuration, mesh and device for the steps of a training.
#include "train/step_plan.h"

#include <catch2/catch.hpp>

#include "train/communication.h"

using namespace sluice;
using Catch::Contains;

namespace {

Config tiny_config() {
  Config config;
  config.train.micro_batch_size = 2;
  config.train.global_batch_size = 16;  // eight micro-batches
  config.model.hidden_size = 32;
  return config;
}

/// Of one rank of so many that are not there.
StepPlan plan_of(const Config& config, int ranks, int rank = 0, Device device = Device::cpu) {
  const auto world = make_dry_communicator(rank, ranks);
  const Mesh mesh(*world, mesh_shape(config.parallel));
  return StepPlan(config, mesh, device);
}

}  // namespace

TEST_CASE("ranks share a step's micro-batches in equal consecutive parts", "[step_plan]") {
  const Config config = tiny_config();
  CHECK(plan_of(config, 1).micro_batches() == 8);
  CHECK_FALSE(plan_of(config, 1).several_ranks());
  std::vector<int64_t> all;
  for (int rank = 0; rank < 4; ++rank) {
    const StepPlan plan = plan_of(config, 4, rank);
    CHECK(plan.several_ranks());
    CHECK(plan.micro_batches() == 2);
    for (int64_t i = 0; i < plan.micro_batches(); ++i) all.push_back(plan.global_micro_batch(i));
  }
  CHECK(all == std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK_THROWS_WITH(plan_of(config, 3), Contains("16 is 8 micro-batches of 2") && Contains("multiple of 6"));
}

TEST_CASE("a dry run needs one micro-batch", "[step_plan]") {
  const auto world = make_dry_communicator(1, 2);
  const Mesh mesh(*world, {});
  const StepPlan plan(tiny_config(), mesh, Device::cpu, /*dry_run=*/true);
  CHECK(plan.dry_run());
  CHECK(plan.micro_batches() == 4);
  CHECK(plan.computed_micro_batches() == 1);
}

TEST_CASE("zero_stage says what is sharded, and with what ranks communicate", "[step_plan]") {
  for (int64_t stage = 0; stage < 4; ++stage) {
    INFO("zero_stage " << stage);
    Config config = tiny_config();
    config.parallel.zero_stage = stage;
    const StepPlan plan = plan_of(config, 2);
    CHECK(plan.shards_optimizer() == (stage >= 1));
    CHECK(plan.shards_gradients() == (stage >= 2));
    CHECK(plan.shards_weights() == (stage == 3));
    CHECK(plan.store_layout().whole_grads == (stage < 2));
    CHECK(plan.store_layout().whole_values == (stage < 3));
    CHECK(plan.store_layout().dense_ranks == 2);
    CHECK(plan.store_layout().expert_ranks == 2);
    CHECK(plan.forward_needs_all_ranks() == (stage == 3));
    CHECK(plan.norm_needs_all_ranks() == (stage >= 1));
    CHECK(plan.follows_units());
    CHECK(plan.sums_losses_in_order());
    // Of the rank's four micro-batches: the last sends gradients, the first gathers updated weights.
    std::vector<bool> eager;
    for (int64_t i = 0; i < 4; ++i) eager.push_back(plan.needs_eager(i));
    CHECK(eager == (stage == 0   ? std::vector<bool>{false, false, false, true}
                    : stage == 1 ? std::vector<bool>{true, false, false, true}
                                 : std::vector<bool>{true, true, true, true}));
  }
}

TEST_CASE("one rank replays every micro-batch and sums in place", "[step_plan]") {
  const StepPlan plan = plan_of(tiny_config(), 1, 0, Device::cuda);
  for (int64_t i = 0; i < plan.micro_batches(); ++i) CHECK_FALSE(plan.needs_eager(i));
  CHECK_FALSE(plan.follows_units());
  CHECK_FALSE(plan.sums_losses_in_order());
  CHECK(plan.updates_on_device_alone());
  CHECK(plan.loads_ahead());
  CHECK(plan.losses_per_rank() == 1);
  const StepPlan cpu = plan_of(tiny_config(), 1);
  CHECK_FALSE(cpu.updates_on_device_alone());
  CHECK_FALSE(cpu.loads_ahead());
  CHECK(cpu.losses_per_rank() == 8);
}

TEST_CASE("exact sums need the order of micro-batches on every layout", "[step_plan]") {
  Config config = tiny_config();
  config.parallel.determinism = Determinism::exact;
  for (const Device device : {Device::cpu, Device::cuda}) {
    const StepPlan plan = plan_of(config, 1, 0, device);
    CHECK(plan.exact());
    CHECK(plan.follows_units());
    CHECK(plan.sums_losses_in_order());
    CHECK(plan.losses_per_rank() == 8);
    CHECK(plan.norm_needs_all_ranks());
    CHECK_FALSE(plan.updates_on_device_alone());
    CHECK(plan.needs_eager(0));
  }
}

TEST_CASE("ranks that share sequences have the same micro-batches, and losses of their own",
          "[step_plan][context]") {
  Config config = tiny_config();
  config.data.seq_len = 64;
  config.parallel.context = 2;
  const StepPlan plan = plan_of(config, 4, 3);
  CHECK(plan.context_parallel());
  CHECK(plan.forward_needs_all_ranks());
  CHECK(plan.needs_eager(0));
  CHECK(plan.micro_batches() == 4);
  CHECK(plan.global_micro_batch(0) == 4);
  CHECK(plan_of(config, 4, 2).global_micro_batch(0) == 4);
  CHECK_FALSE(plan.sums_whole_sequences());
  CHECK(plan.ranks_of_sum() == 1);
  CHECK(plan.store_layout().dense_ranks == 4);
  CHECK_FALSE(plan_of(tiny_config(), 4).context_parallel());
  CHECK_THROWS_WITH(plan_of(config, 3),
                    Contains("context = 2: 3 ranks cannot be divided into groups of that size") ||
                        Contains("3 ranks cannot be divided into groups of 2"));
  CHECK_THROWS_WITH(plan_of(config, 6), Contains("3 groups of 2 ranks cannot share"));

  config.parallel.determinism = Determinism::exact;
  const StepPlan exact = plan_of(config, 4, 3);
  CHECK(exact.sums_whole_sequences());
  CHECK(exact.ranks_of_sum() == 2);
  CHECK(exact.global_micro_batch(0) == 4);
  config.parallel.context = 1;
  CHECK_FALSE(plan_of(config, 4).sums_whole_sequences());
}

TEST_CASE("experts on several ranks make every forward pass collective", "[step_plan]") {
  Config config = tiny_config();
  config.parallel.expert = 2;
  const StepPlan plan = plan_of(config, 4, 3);
  CHECK(plan.expert_parallel());
  CHECK(plan.forward_needs_all_ranks());
  CHECK(plan.norm_needs_all_ranks());
  CHECK(plan.needs_eager(0));
  CHECK(plan.micro_batches() == 2);
  CHECK(plan.global_micro_batch(0) == 6);
  CHECK(plan.store_layout().dense_ranks == 4);
  CHECK(plan.store_layout().expert_ranks == 2);
  CHECK(plan.store_layout().grad_sources == 1);
  config.parallel.determinism = Determinism::exact;
  CHECK(plan_of(config, 4).store_layout().grad_sources == 2);
}

TEST_CASE("axes that this version does not train on are refused by name", "[step_plan]") {
  CHECK_THROWS_WITH(mesh_shape({.tensor = 2}), "parallel.tensor = 2 is not available in this version; use 1");
  CHECK(mesh_shape({.context = 4}).context == 4);
  CHECK_THROWS_WITH(mesh_shape({.pipeline = 2}),
                    "parallel.pipeline = 2 is not available in this version; use 1");
  CHECK(mesh_shape({.expert = 4}).expert == 4);
}
