#pragma once
// The order in which backward takes tiles of keys: those with most tiles of queries first, so that no long
// one is left for the end, when most multiprocessors have nothing to do.
#include "attention/visible_keys.cuh"

namespace sluice::cuda {

/// A tile of keys, and the tiles of queries with one that sees any of them: from the first whose own keys
/// reach these on, those that do not start after the last document of these keys. None where m_last is before
/// m_first. Other queries of such a tile may see none of these keys.
struct KeyTile {
  int n, m_first, m_last;
};
template <int kQueries, int kKeys>
DEVICE_INLINE KeyTile key_tile(const VisibleKeys& visible, int query_tiles, int n) {
  const int first = visible.own.first_query(n * kKeys) / kQueries;
  int last = first - 1, high = query_tiles;
  while (high - last > 1) {
    const int middle = (last + high) / 2;
    if (visible.first[middle * kQueries] < (n + 1) * kKeys)
      last = middle;
    else
      high = middle;
  }
  return {n, first, last};
}

constexpr int kOrderThreads = 256;

/// One block: order (key tiles). A tile of keys waits for those before it down to one that begins with a
/// document, and so stays behind them: each counts as the longest that may wait for it. Where the queries are
/// any of the keys, tiles of queries reach over what lies between: their order stays as it is. Dynamic shared
/// memory: two numbers for each.
template <int kQueries, int kKeys>
__global__ void __launch_bounds__(kOrderThreads)
    order_key_tiles_kernel(KeyTile* order, VisibleKeys visible, int key_tiles, int query_tiles) {
  DYN_SMEM(int, steps, 16);
  int* const longest = steps + key_tiles;
  const int thread = static_cast<int>(threadIdx.x);
  for (int n = thread; n < key_tiles; n += kOrderThreads) {
    const KeyTile tile = key_tile<kQueries, kKeys>(visible, query_tiles, n);
    steps[n] = visible.own.key ? 0 : tile.m_last - tile.m_first + 1;
  }
  __syncthreads();
  for (int n = thread; n < key_tiles; n += kOrderThreads) {
    int most = steps[n];
    for (int i = n + 1; i < key_tiles && !visible.own.key && visible.first[i * kKeys] != i * kKeys; ++i)
      most = max(most, steps[i]);
    longest[n] = most;
  }
  __syncthreads();
  for (int n = thread; n < key_tiles; n += kOrderThreads) {
    int before = 0;
    for (int i = 0; i < key_tiles; ++i)
      before += longest[i] > longest[n] || (longest[i] == longest[n] && i < n);
    order[before] = key_tile<kQueries, kKeys>(visible, query_tiles, n);
  }
}

}  // namespace sluice::cuda
