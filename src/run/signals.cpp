#include "run/signals.h"

#include <csignal>

namespace sluice {
namespace {

constexpr int kSignals[] = {SIGUSR1, SIGUSR2, SIGTERM, SIGINT, SIGXCPU, SIGHUP};

// A signal handler can only write to static variables.
volatile std::sig_atomic_t first_signal = 0, signal_count = 0;

extern "C" void on_stop_signal(int number) {
  if (signal_count == 0) first_signal = number;
  signal_count = signal_count + 1;
  if (signal_count >= 3) {
    std::signal(number, SIG_DFL);
    std::raise(number);
  }
}

void install(void (*handler)(int)) {
  for (const int number : kSignals) {
    struct sigaction action {};
    if (number == SIGHUP && sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN)
      continue;
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, nullptr);
  }
}

}  // namespace

StopSignals::StopSignals() {
  first_signal = 0;
  signal_count = 0;
  install(on_stop_signal);
}
StopSignals::~StopSignals() { install(SIG_DFL); }

bool StopSignals::requested() const { return signal_count > 0; }

const char* StopSignals::name() const {
  switch (first_signal) {
    case SIGUSR1:
      return "SIGUSR1";
    case SIGUSR2:
      return "SIGUSR2";
    case SIGTERM:
      return "SIGTERM";
    case SIGINT:
      return "SIGINT";
    case SIGXCPU:
      return "SIGXCPU";
    case SIGHUP:
      return "SIGHUP";
    default:
      return "";
  }
}

}  // namespace sluice
