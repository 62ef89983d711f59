#pragma once
// Rules of a configuration that only its model decides.
#include <cstdint>

#include "config/config.h"
#include "config/load.h"

namespace sluice {

/// Checks a configuration whose widths are known: what `ranks` ranks can share (config/rank_rules.h), and
/// whether lora.targets and optimizer.rules name parameters of its model. Throws ConfigError with all
/// problems that it finds, each with the place of its key in `places`. Allocates none of the model's memory.
void require_model_rules(const Config& config, int64_t ranks, const KeyPlaces& places = {});

}  // namespace sluice
