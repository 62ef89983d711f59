#pragma once
#include <chrono>

namespace sluice {

/// Seconds of a clock that is never set, from an arbitrary origin.
inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace sluice
