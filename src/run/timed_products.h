#pragma once
// Before the first step on a GPU: the algorithms of the step's matrix products are looked up or timed.
#include <set>
#include <string>

#include "comm/communicator.h"
#include "config/config.h"
#include "ops/product_algorithms.h"
#include "run/run_folder.h"

namespace sluice {

struct TimedProducts {
  ProductAlgorithms algorithms;
  std::string text;  // for the console: how many were timed; rank 0's
};

/// Collective. For the products of all ranks: those of RUN/matmul_algorithms.json where it has them for this
/// card and this version of cuBLASLt; rank 0 times the others, now, and adds them to the file. Equal on all
/// ranks, whose cards are of one kind (start_facts.h). A file that is damaged, or of other cards alone, is a
/// warning. None with parallel.determinism: exact, or train.matmul_algorithm: heuristic. SharedError where
/// products cannot be timed or the file not written. folder: rank 0's.
TimedProducts choose_algorithms(const RunFolder* folder, const Config& config,
                                const std::set<GpuProduct>& products, Communicator& ranks);

}  // namespace sluice
