#pragma once
// How many threads to compute with: the cores that this process may use, alone or beside other ranks of its
// machine.
#include <cstdint>
#include <optional>
#include <string>

namespace sluice {

struct Cores {
  int allowed = 1;              // by the affinity mask
  std::optional<double> quota;  // by control groups
  uint64_t mask = 0;            // a hash of the affinity mask
};
Cores cores_of_process();

/// Threads for one of `ranks` ranks on a machine, of which `same_mask` share its affinity mask: at least 1. A
/// quota is rounded down: a thread that is stopped for a part of every period keeps the others waiting.
int default_threads(const Cores& cores, int same_mask = 1, int ranks = 1);

/// What is wrong with so many threads in each of these ranks; empty when nothing is.
std::string too_many_threads(const Cores& cores, int threads, int same_mask = 1, int ranks = 1);

/// Sets the number of threads for a process that computes alone: `wanted` (train.threads); where that is 0,
/// OMP_NUM_THREADS; where that is not set, default_threads.
void use_threads(int64_t wanted);

/// What OMP_NUM_THREADS asks for; 0 where it is not set.
int threads_of_environment();

}  // namespace sluice
