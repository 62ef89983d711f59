#pragma once
// Rules of the training loop: batches, optimizer, schedule, adapters, ranks. Internal to this folder.
#include "config/checks.h"

namespace sluice {

void check_training_rules(const Config& config, Checks& check);

}  // namespace sluice
