#pragma once
// status.json of a run that one rank ends alone: rank 0, which writes that file otherwise, does not learn of
// it.
#include <cstdint>
#include <string>

#include "core/error.h"

namespace sluice {

class FailureStatus {
 public:
  /// How far the run has come.
  struct Reached {
    int64_t step, tokens, saved_step;  // saved_step -1: nothing is saved
  };

  /// After rank 0 has taken the folder.
  FailureStatus(std::string folder, int rank);
  ~FailureStatus();
  FailureStatus(const FailureStatus&) = delete;
  FailureStatus& operator=(const FailureStatus&) = delete;

  /// Replaces the state "running" by "failed", with the error, its exit code, what was reached, and this rank
  /// as the one that failed, except for ExitCode::hang, which any rank may report of another. What rank 0
  /// last wrote may be some steps old: what is of a step and is not known here is left out. Does nothing if
  /// the status already says how the run ended, or if the folder cannot be written or is no longer this
  /// run's: the error is reported elsewhere, too. Any thread may call.
  void write(const std::string& error, ExitCode code, const Reached& reached) const noexcept;

  /// Removes from a folder the copies of the status that ranks leave when they are killed inside write(). For
  /// the start that owns the folder; a copy that cannot be removed is a warning.
  static void remove_leftovers(const std::string& folder) noexcept;

 private:
  bool ours() const;

  std::string folder_;
  int rank_;
  int lock_;  // refers to the folder's lock without opening it; -1: it was not found
};

}  // namespace sluice
