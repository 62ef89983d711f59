#pragma once
// Impossible combinations, each reported at the key that is wrong. Internal to load.cpp.
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"

namespace sluice {

/// Called for each problem: the keys involved, the one to point at first, and one line that says what is
/// wrong and what to do.
class ProblemSink {
 public:
  virtual ~ProblemSink() = default;
  virtual void operator()(const std::vector<std::string>& keys, const std::string& message) = 0;
};

/// Everything that cannot work whatever the configuration is used for.
void check_combinations(const Config& config, ProblemSink& problem);
/// What training needs beyond that.
void check_training(const Config& config, ProblemSink& problem);

}  // namespace sluice
