#pragma once
// A command as one of the processes that a launcher started.
#include <functional>

#include "comm/communicator.h"
#include "config/config.h"

namespace sluice {

/// Finds the others, takes this rank's GPU, and runs body. What it throws main tells, where there is one
/// rank; with several, the one who found it tells, and ends all of them with its exit code. before_abort:
/// called before that. limit_seconds: how long the ranks may take to find each other; 0: for ever.
void run_as_rank(
    const std::function<void(Communicator& world)>& body,
    double limit_seconds = ParallelConfig().timeout_seconds,
    const std::function<void()>& before_abort = [] {});

}  // namespace sluice
