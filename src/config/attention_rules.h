#pragma once
// Rules of the kind of attention, its window and its kernel. Internal to this folder.
#include "config/checks.h"

namespace sluice {

void check_attention(const ModelConfig& model, Checks& check);

}  // namespace sluice
