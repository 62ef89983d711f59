#pragma once
// Runs a command as one of the processes started by a launcher.
#include <functional>
#include <string>

#include "comm/communicator.h"
#include "config/config.h"

namespace sluice {

/// Creates the world, selects this rank's GPU, and runs body. With a single rank, main reports an exception
/// of body; with several, the rank where it occurred reports it and ends all ranks with its exit code.
/// before_abort: called before that. limit_seconds: how long the creation of the world may take; 0: no limit.
void run_as_rank(
    const std::function<void(Communicator& world)>& body,
    double limit_seconds = ParallelConfig().timeout_seconds,
    const std::function<void()>& before_abort = [] {});

/// Error(usage) that begins with `option` unless the ranks can be divided into groups of `size`, of which
/// each shares sequences.
void require_groups(const Communicator& world, const std::string& option, int64_t size);

}  // namespace sluice
