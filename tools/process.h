#pragma once
// What the program settles with the system before anything else.

namespace sluice {

/// Opens /dev/null for each of standard input, output and error that is closed: otherwise the next file to be
/// opened would take its number, and messages would go into it.
void open_standard_streams();

/// Settles what the libraries read as they are loaded, before main, by starting the program once more with
/// two variables, each unless the user has set it. GOMP_SPINCOUNT (or OMP_WAIT_POLICY): threads that wait for
/// work spin for a short time and then sleep, where libgomp's default spins for milliseconds and takes the
/// cores from other processes and from the threads that are waited for. OPENBLAS_NUM_THREADS=1: it is called
/// by our threads and needs none of its own; where they cannot be made (ulimit -v) it hangs at the end.
void settle_threads(char** argv);

/// Writes out what is left for standard output. False with a message where that, or a write before, has
/// failed; a pipe that is read no more is no failure.
bool flush_standard_output(const char** problem);

}  // namespace sluice
