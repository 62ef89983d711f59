#pragma once
#include "config/config.h"
#include "config/problems.h"

namespace sluice {

/// Tasks and prompts of evaluations.
void check_tasks(const Config& config, ProblemSink& problem);

}  // namespace sluice
