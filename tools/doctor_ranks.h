#pragma once
// What several ranks see of each other: `sluice doctor` under mpirun or srun.
#include <string>

#include "comm/communicator.h"

namespace sluice {

/// Collective, a few seconds; rank 0 prints one table: hosts, launcher, threads and cores, whether all run
/// the same program, clocks, speed of the communicator, and whether `folder` (made where it is missing) is
/// one that all ranks share.
void doctor_ranks(Communicator& ranks, const std::string& folder);

/// How the processes were started, from the environment: "mpirun (OMPI_COMM_WORLD_SIZE=4)"; "" for a plain
/// start.
std::string launcher_text();
/// What launchers and Slurm say in this process's environment, as NAME=value words; nothing but known names.
std::string launcher_variables();

}  // namespace sluice
