#pragma once
// Checks for impossible combinations of keys; each problem is reported at the key that is wrong. Internal to
// this folder.
#include "config/problems.h"

namespace sluice {

/// Combinations that cannot work in any sub-command.
void check_combinations(const Config& config, ProblemSink& problem);
/// Further requirements of training.
void check_training(const Config& config, ProblemSink& problem);

}  // namespace sluice
