#pragma once
#include <cstdint>

#include "config/config.h"

namespace sluice {

/// Learning rate of optimizer step `step` (from 0) of `max_steps`. Warm-up is linear and reaches lr at step
/// warmup_steps; cosine and linear reach min_lr at max_steps; wsd holds lr and falls linearly to min_lr over
/// decay_steps.
double learning_rate(const OptimizerConfig& config, int64_t step, int64_t max_steps);

}  // namespace sluice
