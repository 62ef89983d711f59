#pragma once
// Ranks compare program, configuration and data before they do anything together. Ranks that differ would
// train, or measure, a mixture of two models, or hang in mismatched messages.
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"

namespace sluice {

/// Values that must be equal on all ranks, as text by name.
class StartFacts {
 public:
  /// Adds a fact or replaces the one of the same name. `code`: exit code of the error if ranks differ in it.
  void set(const std::string& name, const std::string& value, ExitCode code = ExitCode::usage);
  /// Converts all facts to one text and back.
  std::string serialize() const;
  static StartFacts parse(const std::string& text);

  struct Fact {
    std::string name, value;
    ExitCode code;
  };
  /// How long ranks may wait for each other until the comparison; 0: no limit.
  double wait_seconds = ParallelConfig().timeout_seconds;

  const std::vector<Fact>& all() const { return facts_; }
  const Fact* find(const std::string& name) const;

 private:
  std::vector<Fact> facts_;
};

/// Collective; the first collective of a command on several ranks. Runs prepare, which states facts, and
/// compares them. Message sizes are equal in all builds, so that ranks of different builds also get an error.
/// If facts differ, or prepare throws an Error on some ranks, all ranks throw the same Error, which lists
/// every difference with values, ranks and hosts, and the error of each rank.
void agree_on_start(Communicator& ranks, const std::function<void(StartFacts&)>& prepare);

}  // namespace sluice
