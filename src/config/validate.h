#pragma once
// Checks for impossible combinations of keys; each problem is reported at the key that is wrong. Internal to
// this folder.
#include <string>
#include <vector>

#include "config/load.h"

namespace sluice {

/// Called for each problem with the keys involved, of which the first is the one to point at, and one line
/// that says what is wrong and how to fix it.
class ProblemSink {
 public:
  virtual ~ProblemSink() = default;
  virtual void operator()(const std::vector<std::string>& keys, const std::string& message) = 0;
};

/// Problems as lines of text, each behind the place of the first of its keys that `places` has.
class ProblemLines : public ProblemSink {
 public:
  explicit ProblemLines(const KeyPlaces* places = nullptr) : places_(places) {}
  void operator()(const std::vector<std::string>& keys, const std::string& message) override;
  /// Throws Error(usage) with all of them, if there are any.
  void raise() const;

 private:
  const KeyPlaces* places_;
  std::string text_;
};

/// Combinations that cannot work in any sub-command.
void check_combinations(const Config& config, ProblemSink& problem);
/// Further requirements of training.
void check_training(const Config& config, ProblemSink& problem);

}  // namespace sluice
