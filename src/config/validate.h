#pragma once
// Checks for impossible combinations of keys; each problem is reported at the key that is wrong. Internal to
// load.cpp.
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"

namespace sluice {

/// Called for each problem with the keys involved, of which the first is the one to point at, and one line
/// that says what is wrong and how to fix it.
class ProblemSink {
 public:
  virtual ~ProblemSink() = default;
  virtual void operator()(const std::vector<std::string>& keys, const std::string& message) = 0;
};

/// Combinations that cannot work in any sub-command.
void check_combinations(const Config& config, ProblemSink& problem);
/// Further requirements of training.
void check_training(const Config& config, ProblemSink& problem);

}  // namespace sluice
