#pragma once
// Reductions over ranks with a deterministic order: a tree whose shape depends only on the number of ranks.
// With 2^k ranks it is the perfect binary tree, which is the upper part of the tree over micro-batches that
// `exact` training uses (README.md). Integer sums are exact in any order.
#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "core/tree_sum.h"

namespace sluice {

/// mine (n) = the sum of the `size` parts of received (size x n), which is overwritten.
template <class T>
void sum_parts(T* mine, T* received, int size, int64_t n) {
  std::vector<T*> rows;
  rows.reserve(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) rows.push_back(received + r * n);
  tree_sum(rows.data(), size, n);
  for (int64_t i = 0; i < n; ++i) mine[i] = received[i];
}

/// All-reduce for few elements: data (n) = its sum over the ranks, computed on every rank after an
/// all-gather.
template <class T>
void all_reduce(Communicator& comm, T* data, int64_t n) {
  if (comm.size() == 1) return;
  std::vector<T> all(static_cast<size_t>(comm.size() * n));
  comm.all_gather(all.data(), data, n * static_cast<int64_t>(sizeof(T)));
  sum_parts(data, all.data(), comm.size(), n);
}

/// Collective. Whether it is true on any rank.
inline bool any_rank(Communicator& comm, bool mine) {
  int64_t count = mine ? 1 : 0;
  all_reduce(comm, &count, 1);
  return count > 0;
}

}  // namespace sluice
