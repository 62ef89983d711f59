#pragma once
// What the steps of a training say.
#include <utility>
#include <vector>

#include "train/trainer.h"

namespace sluice::test {

/// Losses and gradient norms of so many steps.
inline std::pair<std::vector<double>, std::vector<double>> take_steps(Trainer& trainer, int64_t steps) {
  std::pair<std::vector<double>, std::vector<double>> results;
  for (int64_t i = 0; i < steps; ++i) {
    const StepMetrics m = trainer.step();
    results.first.push_back(m.loss);
    results.second.push_back(m.grad_norm);
  }
  return results;
}

}  // namespace sluice::test
