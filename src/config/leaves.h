#pragma once
// Every key of a configuration with its value, as text.
#include <string>
#include <vector>

#include "config/config.h"
#include "config/fields.h"

namespace sluice {

struct Leaf {
  std::string key, value;  // "model.rope.theta"; as YAML writes the value
};

/// In the order of the reference; an element of a list is model.attention.gates[0].position.
inline std::vector<Leaf> leaves(Config config) {
  std::vector<Leaf> out;
  for_each_leaf(config, [&](const std::string& key, auto& member, const char*) {
    out.push_back({key, scalar_text(member)});
  });
  return out;
}

}  // namespace sluice
