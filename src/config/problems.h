#pragma once
// Problems of a configuration. A check reports a problem with the keys that are involved; the loader, which
// knows the file and line of each key, puts them in front of the message.
#include <functional>
#include <string>
#include <vector>

#include "config/load.h"
#include "core/error.h"

namespace sluice {

/// The keys involved, of which the first is the one to point at, and one line that says what is wrong and how
/// to fix it.
struct ConfigProblem {
  std::vector<std::string> keys;
  std::string message;
};

/// Called for each problem.
class ProblemSink {
 public:
  virtual ~ProblemSink() = default;
  virtual void operator()(const std::vector<std::string>& keys, const std::string& message) = 0;
};

/// Error(usage) with a line for each problem, which begins with the place of the first of its keys that
/// `places` has.
class ConfigError : public Error {
 public:
  explicit ConfigError(std::vector<ConfigProblem> problems, const KeyPlaces& places = {});
  const std::vector<ConfigProblem>& problems() const { return problems_; }

 private:
  std::vector<ConfigProblem> problems_;
};

/// Throws a ConfigError of one problem.
[[noreturn]] void refuse(std::vector<std::string> keys, const std::string& message);

/// Collects problems.
class ProblemList : public ProblemSink {
 public:
  void operator()(const std::vector<std::string>& keys, const std::string& message) override {
    problems_.push_back({keys, message});
  }
  void add(const ConfigError& error) {
    problems_.insert(problems_.end(), error.problems().begin(), error.problems().end());
  }
  /// Throws a ConfigError of all problems, if there are any.
  void raise(const KeyPlaces& places = {}) const {
    if (!problems_.empty()) throw ConfigError(problems_, places);
  }

 private:
  std::vector<ConfigProblem> problems_;
};

/// Calls f. A ConfigError that it throws is thrown on with the places of its keys.
void with_places(const KeyPlaces& places, const std::function<void()>& f);

}  // namespace sluice
