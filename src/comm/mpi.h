#pragma once
// Ranks as processes that mpirun or srun started.
#include "comm/communicator.h"

namespace sluice {

/// Whether this program was built with MPI.
bool built_with_mpi();
/// MPI, the host library and its version, in a line; "" without.
std::string mpi_version();

/// The world of a launcher: initialises MPI. One rank alone where no launcher's environment is seen, or in a
/// program without MPI. Error(usage) where a launcher started several processes that do not see each other
/// (srun without PMIx, or an mpirun of another MPI): each would train alone. Where MPI has not come up after
/// `limit_seconds` (0: for ever), because a process that was started with this one does not take part, the
/// process ends with ExitCode::hang.
std::unique_ptr<Communicator> make_world(double limit_seconds = 0);

/// What launchers say in the environment: ranks started, or 0; which variable says so; and which of them this
/// process is.
struct LauncherSize {
  int size = 0;
  const char* variable = "";
  int rank = 0, local_rank = 0;  // local: among those of this machine
};
LauncherSize launcher_size();

}  // namespace sluice
