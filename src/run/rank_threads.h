#pragma once
// Number of threads when training on several ranks.
#include "comm/communicator.h"

namespace sluice {

/// Collective. Sets this rank's number of threads: `wanted` (train.threads) unless it is 0, else
/// OMP_NUM_THREADS if set, else its part of the cores that it shares with other ranks on its machine. Rank 0
/// warns if a rank has more threads than cores.
void use_threads(int64_t wanted, Communicator& ranks);

}  // namespace sluice
