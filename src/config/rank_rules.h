#pragma once
// Rules between a configuration and the number of ranks that share its training.
#include <cstdint>

#include "config/config.h"
#include "config/load.h"

namespace sluice {

class ProblemSink;

/// Reports what `ranks` ranks cannot do with this configuration: experts or a global batch that they cannot
/// share equally, and what parallel.determinism: exact needs beyond that. ranks = 0: not known, and only
/// what does not depend on it is checked. load_config calls it.
void check_rank_rules(const Config& config, int64_t ranks, ProblemSink& problem);

/// The same for a configuration that was made in memory, or has changed since it was read
/// (model.match_parameters_of): throws ConfigError (config/problems.h).
void require_rank_rules(const Config& config, int64_t ranks, const KeyPlaces& places = {});

}  // namespace sluice
