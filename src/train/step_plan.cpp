#include "train/step_plan.h"

#include "config/rank_rules.h"

namespace sluice {
namespace {

/// How many micro-batches of a step each rank computes, or its part of them.
int64_t micro_batches_per_rank(const Config& config, const Mesh& mesh) {
  require_rank_rules(config, mesh.world().size());
  return config.train.global_batch_size / config.train.micro_batch_size / mesh.data().size();
}

}  // namespace

StepPlan::StepPlan(const Config& config, const Mesh& mesh, Device device, bool dry_run)
    : dry_run_(dry_run),
      on_gpu_(device == Device::cuda),
      exact_(config.parallel.determinism == Determinism::exact),
      zero_stage_(config.parallel.zero_stage),
      data_rank_(mesh.data().rank()),
      data_ranks_(mesh.data().size()),
      token_ranks_(mesh.tokens().size()),
      expert_ranks_(mesh.expert().size()),
      expert_data_ranks_(mesh.expert_data().size()),
      micro_batches_(micro_batches_per_rank(config, mesh)) {}

StoreLayout StepPlan::store_layout() const {
  return {.dense_ranks = static_cast<int>(token_ranks_),
          .expert_ranks = static_cast<int>(expert_data_ranks_),
          .grad_sources = exact_ ? static_cast<int>(expert_ranks_) : 1,
          .whole_values = !shards_weights(),
          .whole_grads = !shards_gradients()};
}

bool StepPlan::needs_eager(int64_t i) const {
  if (expert_parallel() || context_parallel() || exact_) return true;
  const bool sends_gradients = shards_gradients() || (several_ranks() && i + 1 == micro_batches_);
  const bool gathers_weights = shards_weights() || (shards_optimizer() && i == 0);
  return sends_gradients || gathers_weights;
}

}  // namespace sluice
