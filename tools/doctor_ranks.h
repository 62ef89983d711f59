#pragma once
// `sluice doctor` on several ranks, under mpirun or srun.
#include <string>

#include "comm/communicator.h"

namespace sluice {

/// Collective; takes a few seconds. Rank 0 prints one table: hosts, launcher, threads and cores, whether all
/// ranks run the same program, clocks, speed of the communicator, and whether all ranks share `folder`
/// (created if it is missing).
void doctor_ranks(Communicator& ranks, const std::string& folder);

/// How the processes were started, according to the environment: "mpirun (OMPI_COMM_WORLD_SIZE=4)"; ""
/// without a launcher.
std::string launcher_text();
/// Environment variables of launchers and Slurm as NAME=value words; known names only.
std::string launcher_variables();

}  // namespace sluice
