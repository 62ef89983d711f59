#pragma once
// Ranks as threads of one process, for tests: what the ranks of a real run do, without a launcher.
#include <atomic>
#include <functional>

#include "comm/communicator.h"

namespace sluice {

/// A link that is slower than memory, to see what of its time is hidden and what shows.
struct SlowLink {
  std::atomic<double> seconds_per_byte = 0;  // may change between operations
  std::atomic<int64_t> taken_ns = 0;         // by all ranks together
};

struct ThreadRanksOptions {
  /// A rank that waits longer than this for the others throws Error(hang), and so do all; 0: for ever.
  double timeout_seconds = 60;
  SlowLink* link = nullptr;
};

/// Runs body(communicator) on `size` threads and waits for all. The first exception of a rank releases the
/// others, which throw Error(hang) naming it, and is thrown again here. abort() ends its rank alone, as an
/// exception with its code.
void run_thread_ranks(int size, const std::function<void(Communicator&)>& body,
                      const ThreadRanksOptions& options = {});

}  // namespace sluice
