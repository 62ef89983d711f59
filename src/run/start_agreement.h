#pragma once
// Ranks compare what they are about to do, before they do anything together: ranks with different programs,
// configurations or data would train a mixture of two models, or hang in messages that do not fit.
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"

namespace sluice {

/// What must be equal on all ranks, as text by name.
class StartFacts {
 public:
  /// A fact of a name that is there takes its place. `code`: of the error where ranks differ in it.
  void set(const std::string& name, const std::string& value, ExitCode code = ExitCode::usage);
  /// Every fact in one text, and back.
  std::string serialize() const;
  static StartFacts parse(const std::string& text);

  struct Fact {
    std::string name, value;
    ExitCode code;
  };
  /// How long ranks may wait for each other to come to the comparison; 0: for ever.
  double wait_seconds = ParallelConfig().timeout_seconds;

  const std::vector<Fact>& all() const { return facts_; }
  const Fact* find(const std::string& name) const;

 private:
  std::vector<Fact> facts_;
};

/// Collective; the first collective of a command that has several ranks. Runs prepare, which states facts as
/// it finds them, and compares. Messages have sizes that no build changes, so that ranks of different builds
/// come to a message, too. Where facts differ, or prepare throws an Error on some ranks, all ranks throw the
/// same Error: it lists every difference with the values, ranks and hosts, and every rank's own error.
void agree_on_start(Communicator& ranks, const std::function<void(StartFacts&)>& prepare);

}  // namespace sluice
