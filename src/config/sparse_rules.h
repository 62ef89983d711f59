#pragma once
#include "config/config.h"
#include "config/problems.h"

namespace sluice {

/// What model.attention.kind: sparse needs of the other keys, and of each other.
void check_sparse(const Config& config, ProblemSink& problem);

}  // namespace sluice
