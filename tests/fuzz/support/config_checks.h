#pragma once
// What must hold of every configuration that was accepted, and texts that come near being one.
#include <string>

#include "config/load.h"
#include "support/fuzz.h"

namespace sluice::fuzz {

/// Written as YAML and read back it is the same configuration; as JSON it is JSON; as config.json it is read
/// back as the same function of the weights.
void check_accepted(const Config& config);

/// A key of the schema, an element of a list as `[0]`, and a value of its type or near it.
struct Setting {
  std::string key, value;
};
Setting random_setting(Random& random);
/// A configuration of a few such keys, as YAML.
std::string random_yaml(Random& random);

}  // namespace sluice::fuzz
