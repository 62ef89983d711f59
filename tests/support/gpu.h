#pragma once
// What tests that need a GPU ask first. A real one or, in an emulated build, the emulator's.
#include <catch2/catch.hpp>

#include "comm/device.h"
#include "core/device.h"

namespace sluice::test {

/// Says so where there is none.
inline bool no_device() {
  if (!cuda_devices().empty()) return false;
  WARN("skipped: no GPU");
  return true;
}

/// Whether ranks that are threads of a test, and share a card, have NCCL: the emulator's bears that, the real
/// one does not. Static: SLUICE_EMULATION is defined only for the files that ask (tests/CMakeLists.txt).
static inline bool threads_have_nccl() {
#if defined(SLUICE_EMULATION)
  return !nccl_version().empty();
#else
  return false;
#endif
}

}  // namespace sluice::test
