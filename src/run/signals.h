#pragma once
// Signals that request saving and exiting: SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGXCPU, and SIGHUP unless it
// is ignored (nohup). The first sets a flag that the training loop polls; the second is ignored, because a
// save is in progress; the third kills the process.

namespace sluice {

/// Catches the signals for its lifetime. One at a time.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  bool requested() const;
  /// "SIGTERM"; "" if none was received.
  const char* name() const;
};

}  // namespace sluice
