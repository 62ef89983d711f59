#pragma once
// Rules of the model: sizes, initialisation, positions, switch heads, experts, head balance. Internal to this
// folder.
#include "config/checks.h"

namespace sluice {

void check_model_rules(const Config& config, Checks& check);

}  // namespace sluice
