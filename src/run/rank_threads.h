#pragma once
// Threads of a training on several ranks.
#include "comm/communicator.h"

namespace sluice {

/// Collective. Sets this rank's number of threads: `wanted` (train.threads); where that is 0,
/// OMP_NUM_THREADS; where that is not set, its part of the cores that it shares with other ranks of its
/// machine. Rank 0 warns where any rank's threads are more than its cores.
void use_threads(int64_t wanted, Communicator& ranks);

}  // namespace sluice
