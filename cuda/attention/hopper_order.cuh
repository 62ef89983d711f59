#pragma once
// The order in which backward takes tiles of keys: those with most tiles of queries first, so that no long
// one is left for the end, when most multiprocessors have nothing to do.
#include "common/launch.h"

namespace sluice::cuda {

/// The last tile of queries with one that sees tile n of keys: the last that does not start after the last
/// document of these keys. kKeys is a multiple of kQueries, which are the rows of the tiles.
template <int kQueries, int kKeys>
DEVICE_INLINE int last_query_tile(const int* first_key, int query_tiles, int n) {
  int last = n * (kKeys / kQueries), high = query_tiles;
  while (high - last > 1) {
    const int middle = (last + high) / 2;
    if (first_key[middle * kQueries] < (n + 1) * kKeys)
      last = middle;
    else
      high = middle;
  }
  return last;
}

constexpr int kOrderThreads = 256;

/// One block: order (key tiles). A tile of keys waits for those before it down to one that begins with a
/// document, and so stays behind them: each counts as the longest that may wait for it. Dynamic shared
/// memory: two numbers for each.
template <int kQueries, int kKeys>
__global__ void __launch_bounds__(kOrderThreads)
    order_key_tiles_kernel(int* order, const int* first_key, int key_tiles, int query_tiles) {
  DYN_SMEM(int, steps, 16);
  int* const longest = steps + key_tiles;
  const int thread = static_cast<int>(threadIdx.x);
  for (int n = thread; n < key_tiles; n += kOrderThreads)
    steps[n] = last_query_tile<kQueries, kKeys>(first_key, query_tiles, n) - n * (kKeys / kQueries) + 1;
  __syncthreads();
  for (int n = thread; n < key_tiles; n += kOrderThreads) {
    int most = steps[n];
    for (int i = n + 1; i < key_tiles && first_key[i * kKeys] != i * kKeys; ++i) most = max(most, steps[i]);
    longest[n] = most;
  }
  __syncthreads();
  for (int n = thread; n < key_tiles; n += kOrderThreads) {
    int before = 0;
    for (int i = 0; i < key_tiles; ++i)
      before += longest[i] > longest[n] || (longest[i] == longest[n] && i < n);
    order[before] = n;
  }
}

}  // namespace sluice::cuda
