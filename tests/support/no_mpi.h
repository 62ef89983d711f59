#pragma once
// For tests that start ranks with mpirun.
#include <catch2/catch.hpp>
#include <cstdlib>

#include "comm/mpi.h"

namespace sluice::test {

/// Whether there is no MPI, in the program or on this machine, which is then said in a warning.
inline bool no_mpi() {
  if (built_with_mpi() && std::system("command -v mpirun >/dev/null") == 0) return false;
  WARN("skipped: no MPI");
  return true;
}

}  // namespace sluice::test
