#pragma once
// Set-up of the process before anything else.

namespace sluice {

/// Opens /dev/null for each of standard input, output and error that is closed. Otherwise the next opened
/// file would get its descriptor, and messages would be written to that file.
void open_standard_streams();

/// Sets variables that libraries read when they are loaded, before main, by executing the program again; each
/// is set unless the user has done so. GOMP_SPINCOUNT (or OMP_WAIT_POLICY): idle threads spin only briefly
/// and then sleep, because libgomp's default of several milliseconds takes cores from other processes and
/// from the threads that are waited for. OMPI_MCA_mpi_yield_when_idle: a rank that waits in Open MPI yields
/// its core between polls, for the same reason. OPENBLAS_NUM_THREADS=1: OpenBLAS is called from Sluice's
/// threads and needs no separate threads; if it cannot start them (ulimit -v), it hangs at exit.
void settle_threads(char** argv);

/// Flushes standard output. Returns false with a message if this or an earlier write has failed; a closed
/// pipe is not a failure.
bool flush_standard_output(const char** problem);

}  // namespace sluice
