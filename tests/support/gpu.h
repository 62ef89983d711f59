#pragma once
// Checks for tests that need a GPU: a real one or, in an emulated build, the emulated one.
#include <catch2/catch.hpp>

#include "comm/device.h"
#include "core/device.h"

namespace sluice::test {

/// Prints a note if there is none.
inline bool no_device() {
  if (!cuda_devices().empty()) return false;
  WARN("skipped: no GPU");
  return true;
}

/// Whether ranks that are threads of one test and share a GPU can use NCCL: the fake NCCL supports that, the
/// real one does not. Static, because SLUICE_EMULATION is defined only for the files that use it
/// (tests/CMakeLists.txt).
static inline bool threads_have_nccl() {
#if defined(SLUICE_EMULATION)
  return !nccl_version().empty();
#else
  return false;
#endif
}

}  // namespace sluice::test
