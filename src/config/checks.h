#pragma once
// Checks of single values, shared by the files that check a configuration. Internal to this folder.
#include <spdlog/fmt/fmt.h>

#include <limits>
#include <string>
#include <vector>

#include "config/problems.h"

namespace sluice {

constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();

/// Checks of one configuration. Each names the keys involved, of which the first is the one to point at.
class Checks {
 public:
  explicit Checks(ProblemSink& problem) : problem_(problem) {}

  void require(bool ok, const std::vector<std::string>& keys, const std::string& message) {
    if (!ok) problem_(keys, message);
  }
  void size(const std::string& key, int64_t value, int64_t low = 1) {
    if (value < low) {
      problem_({key}, low == 0 ? fmt::format("{} must not be negative, got {}", key, value)
                               : fmt::format("{} must be at least {}, got {}", key, low, value));
    } else if (value > kMaxSize) {
      problem_({key}, fmt::format("{} is too large: {}", key, value));
    }
  }
  void count(const std::string& key, int64_t value) {
    require(value >= 0, {key}, fmt::format("{} must not be negative, got {}", key, value));
  }
  void positive(const std::string& key, double value) {
    require(value > 0, {key}, fmt::format("{} must be greater than 0, got {}", key, value));
  }
  void not_negative(const std::string& key, double value) {
    require(value >= 0, {key}, fmt::format("{} must not be negative, got {}", key, value));
  }

 private:
  ProblemSink& problem_;
};

}  // namespace sluice
