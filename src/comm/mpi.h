#pragma once
// Ranks as processes that mpirun or srun has started.
#include "comm/communicator.h"

namespace sluice {

/// Whether this program was built with MPI.
bool built_with_mpi();
/// The MPI library and its version, on one line; "" without MPI.
std::string mpi_version();

/// Initialises MPI and returns the world; a single rank without a launcher or in a program without MPI.
/// Error(usage) if a launcher started several processes that do not see each other (srun without PMIx, or the
/// mpirun of another MPI), because each would train alone. If initialisation takes longer than
/// `limit_seconds` (0: no limit), because another process of the launch does not take part, the process ends
/// with ExitCode::hang.
std::unique_ptr<Communicator> make_world(double limit_seconds = 0);

/// What a launcher's environment variables state: the number of ranks started (or 0), the variable that says
/// so, and the rank of this process.
struct LauncherSize {
  int size = 0;
  const char* variable = "";
  int rank = 0, local_rank = 0;  // local: rank within this machine
};
LauncherSize launcher_size();

}  // namespace sluice
