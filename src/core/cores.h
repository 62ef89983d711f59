#pragma once
// The number of compute threads, from the cores that this process may use, alone or beside other ranks on its
// machine.
#include <cstdint>
#include <optional>
#include <string>

namespace sluice {

struct Cores {
  int allowed = 1;              // cores in the affinity mask
  std::optional<double> quota;  // cores allowed by control groups
  uint64_t mask = 0;            // a hash of the affinity mask
};
Cores cores_of_process();

/// Threads for one of `ranks` ranks on a machine, of which `same_mask` share its affinity mask; at least 1. A
/// quota is rounded down, because one throttled thread keeps the others waiting.
int default_threads(const Cores& cores, int same_mask = 1, int ranks = 1);

/// A warning if this many threads in each of these ranks exceed the cores or the quota; otherwise empty.
std::string too_many_threads(const Cores& cores, int threads, int same_mask = 1, int ranks = 1);

/// Sets the number of threads of a process without other ranks: `wanted` (train.threads) unless it is 0, else
/// OMP_NUM_THREADS if set, else default_threads.
void use_threads(int64_t wanted);

/// The value of OMP_NUM_THREADS; 0 if it is not set.
int threads_of_environment();

}  // namespace sluice
