#pragma once
// Ranks as threads of one process, so that tests can run several ranks without a launcher.
#include <atomic>
#include <cstdint>
#include <functional>

#include "comm/communicator.h"

namespace sluice {

/// Simulates a link that is slower than memory, to measure how much of its time is hidden behind computation.
struct SlowLink {
  std::atomic<double> seconds_per_byte = 0;  // may change between operations
  int64_t only_moves_of = 0;                 // bytes at once; what moves others is not slowed; 0: all is
  std::atomic<int64_t> taken_ns = 0;         // total over all ranks
};

struct ThreadRanksOptions {
  /// If a rank waits longer than this for the others, all ranks throw Error(hang); 0: no limit.
  double timeout_seconds = 60;
  SlowLink* link = nullptr;
};

/// Runs body(communicator) on `size` threads and waits for all. The first exception of a rank makes the
/// others throw an Error(hang) that names it, and is rethrown here. abort() ends only its own rank, by an
/// exception with its code.
void run_thread_ranks(int size, const std::function<void(Communicator&)>& body,
                      const ThreadRanksOptions& options = {});

}  // namespace sluice
