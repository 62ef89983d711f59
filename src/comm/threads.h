#pragma once
// Ranks as threads of one process, for tests: what the ranks of a real run do, without a launcher.
#include <functional>

#include "comm/communicator.h"

namespace sluice {

struct ThreadRanksOptions {
  /// A rank that waits longer than this for the others throws Error(hang), and so do all; 0: for ever.
  double timeout_seconds = 60;
  /// Every byte takes this long on its way, to see what a slow link hides or shows.
  double seconds_per_byte = 0;
};

/// Runs body(communicator) on `size` threads and waits for all. The first exception of a rank releases the others, which
/// throw Error(hang) naming it, and is thrown again here. abort() ends its rank alone, as an exception with its code.
void run_thread_ranks(int size, const std::function<void(Communicator&)>& body, const ThreadRanksOptions& options = {});

}  // namespace sluice
