#pragma once
// Whether a format of Hugging Face folders can hold a model.
#include <string>
#include <vector>

#include "hf/config.h"

namespace sluice {

/// Why a format cannot hold the model, one line per key of the configuration; empty if it holds the model
/// exactly. A key that the format's config.json does not say back counts as one that it cannot hold, so that
/// a feature is refused by name in every format until its reader and writer know it; for `sluice`, until
/// modeling_sluice.py is said to compute it, too.
std::vector<std::string> not_held(const Config& config, HfFormat format);

}  // namespace sluice
