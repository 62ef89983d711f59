#pragma once
// Rules of gates: those of attention and those of norms. Internal to this folder.
#include "config/checks.h"

namespace sluice {

void check_gates(const ModelConfig& model, Checks& check);

}  // namespace sluice
