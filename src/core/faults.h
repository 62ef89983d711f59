#pragma once
// Fault injection for tests (tests/README.md): all such switches of the program. They are environment
// variables; an unset one costs a comparison per file operation or phase. RANK is the launcher's rank;
// without it the switch applies to every rank. An invalid value is Error(usage) when it is first read.
//
// At the n-th mutating operation of core/io.h in a process, counted from 1 (create, write, fsync, rename,
// mkdir, unlink...); a changed value starts a new count:
//   SLUICE_CRASH=[RANK:]n[:torn]            SIGKILL before it, or after half of that write
//   SLUICE_IOFAIL=[RANK:]n:ERRNO[:sticky]   it fails with ENOSPC, EIO, EDQUOT, EACCES, EROFS or EMFILE;
//                                           sticky: so do all operations after it
//   SLUICE_IOTRACE=FILE                     appends a line per operation to FILE: rank, n, what, path
//   SLUICE_PAUSE=[RANK:]io:n:FILE           it waits, as described below
//
// At a step of training (the number of steps done before it):
//   SLUICE_PAUSE=[RANK:]PHASE:step:FILE     creates FILE.RANK and waits until it is removed, at most two
//                                           minutes; PHASE is init (step 0), data, step, all_reduce, save
//                                           or evaluate
//   SLUICE_EXIT=RANK:step:code              _exit(code)
//   SLUICE_HANG=RANK:step                   computes forever
//   SLUICE_MISMATCH=RANK:step               calls one collective more than the other ranks
//   SLUICE_NOMEMORY=RANK:step               throws std::bad_alloc
//   SLUICE_FLIP=RANK:step:NAME:element:bit  flips a bit of what the rank holds of a weight or moment, before
//                                           the update; NAME as in a checkpoint (x.weight, x.weight.m);
//                                           element and bit are taken modulo their numbers
//
// At the n-th thread that a process starts for saving, communication or the watchdog, counted from 1 as
// above:
//   SLUICE_THREADFAIL=[RANK:]n[:sticky]     it cannot be started (EAGAIN); sticky: nor can later ones
//
// At every step:
//   SLUICE_SLOW=RANK:milliseconds           takes this much longer
#include <cstdint>
#include <string>

namespace sluice::faults {

/// This process's rank according to the launcher; 0 without one.
int process_rank();

enum class Io { none, torn, fail };
/// Called before every mutating operation. It may return late or never. `error`: of Io::fail.
Io before_operation(const std::string& action, const std::string& path, int& error);

/// Called when training reaches `phase` (a literal) of a step.
void at(const char* phase, int64_t step);
/// Called before a thread is started; true if starting it is to fail.
bool thread_fails();
/// Whether this rank is to call a collective that the others do not call.
bool mismatched(int64_t step);
/// The bit that a rank is to flip at a step; an empty name means none. Reads the environment on every call.
struct Flip {
  std::string name;
  int64_t element = 0, bit = 0;
};
Flip flip(int rank, int64_t step);

}  // namespace sluice::faults
