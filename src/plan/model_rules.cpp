#include "plan/model_rules.h"

#include "config/derived.h"
#include "config/problems.h"
#include "config/rank_rules.h"
#include "nn/transformer.h"
#include "optim/optimizer.h"
#include "params/param_store.h"

namespace sluice {
namespace {

/// Registers the parameters as a trainer does: lora.targets are checked while they are registered and when
/// the store is allocated, optimizer.rules by the optimizer.
void register_parameters(const Config& config) {
  ParamStore store(config.lora, config.optimizer.rules);
  const Transformer model(config.model, store);
  const Device device = Device::cpu;
  Context dry(0, device);
  Arena values("values", 0, device), gradients("gradients", 0, device);
  store.allocate(dry, storage_dtype(config.train.precision), 1, values, &gradients);
  const Optimizer optimizer(config.optimizer, store);
}

}  // namespace

void require_model_rules(const Config& config, int64_t ranks, const KeyPlaces& places) {
  ProblemList problems;
  check_rank_rules(config, ranks, problems);
  try {
    register_parameters(config);
  } catch (const ConfigError& error) {
    problems.add(error);
  }
  problems.raise(places);
}

}  // namespace sluice
