#pragma once
// Settings that are given but have no effect, because another key turns off what they belong to.
#include <string>
#include <vector>

#include "config/load.h"

namespace sluice {

/// One line for each reason, with the keys that it concerns and the place of the first of them: for a
/// warning, since grids state such settings on purpose. A key counts if it is given in `file` itself or on
/// the command line (a file that is extended states what only some of those that extend it need), with a
/// value that is not the default. `config` and `given` are as load_config(file) returned them.
std::vector<std::string> idle_settings(const Config& config, const KeyPlaces& given, const std::string& file);

}  // namespace sluice
