#pragma once
// Signals that ask a training to save and go: SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGXCPU, and SIGHUP where it
// is not ignored (nohup). The first sets a flag that the loop polls; a second is ignored, since a save is
// under way; a third kills.

namespace sluice {

/// Catches the signals for its lifetime. One at a time.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  bool requested() const;
  /// "SIGTERM"; "" when none came.
  const char* name() const;
};

}  // namespace sluice
