#pragma once
// Pairs of tiles of grouped products on Hopper, which the two blocks of a cluster compute at the same time:
// which they are, and how both blocks learn of the next one; the layout of shared memory.
//
// Where both tiles are of the same group and columns, they multiply by the same b. Pairs are neighbours of
// the list of row tiles, in the same columns; or of a group's weight, column by column: at a group's odd end
// a pair has tiles of two groups, or of two columns, which share nothing. Either way both have as many steps,
// and no block idles but for a tile at the very end of the list, or of a weight with an odd number of tiles:
// there the second block computes a tile without rows or columns.
#include "attention/hopper_common.cuh"
#include "grouped_linear/kernels.cuh"

namespace sluice::cuda::grouped {

constexpr int kRows = kGroupedTileRows, kColumns = 256, kDepth = 64, kStages = 4, kLag = 2;
constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
constexpr int kChunkBytes = 64 * 128;  // 64 rows of 64 elements
constexpr int kABytes = kRows * kDepth * 2, kBBytes = kColumns * kDepth * 2, kStageBytes = kABytes + kBBytes;
constexpr int kStagingBytes = 2 * kChunkBytes;  // where the output of a consumer leaves from
constexpr int kProducerRegisters = 104, kConsumerRegisters = 200;
static_assert(kRows == 64 * kConsumers);
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * kRegistersAtEntry);
// A consumer releases a stage only after it has issued the next step, which must have been published.
static_assert(kLag <= kStages - 2);

constexpr unsigned kPair = 2;  // blocks of a cluster
constexpr int kSlots = 2;      // pairs handed on and not yet read
struct Barriers {
  uint64_t full[kStages], empty[kStages];          // empty: of both blocks' consumers
  uint64_t pair_full[kSlots], pair_empty[kSlots];  // pair_empty: of both blocks' readers, in block 0 alone
  int pair[kSlots];
};
constexpr int kStaging = kStages * kStageBytes, kBarriers = kStaging + kConsumers * kStagingBytes;
constexpr int kSmemBytes = kBarriers + static_cast<int>(sizeof(Barriers));

/// The tile of a block, and whether the other block of its cluster multiplies by the same b.
struct PairTile : GroupedTile {
  bool shares_b;
};

/// The pairs of a product.
template <GroupedKind kKind>
struct Pairs {
  static constexpr bool kWeight = kKind == GroupedKind::backward_weight;
  int columns, rows;  // tiles: of the output, or of a group's
  int of_group;       // pairs, of backward_weight
  int count;

  DEVICE_INLINE explicit Pairs(const GroupedProduct& p)
      : columns((p.n + kColumns - 1) / kColumns),
        rows(kWeight ? (p.m + kRows - 1) / kRows : p.row_tiles[0].x) {
    of_group = (rows * columns + 1) / 2;
    count = kWeight ? p.groups * of_group : (rows + 1) / 2 * columns;
  }
  DEVICE_INLINE PairTile locate(const GroupedProduct& p, int pair, int rank) const {
    PairTile t;
    if constexpr (kWeight) {
      const int first = pair % of_group * 2, at = first + rank;
      t.group = pair / of_group;
      t.m0 = at % rows * kRows, t.m_end = p.m, t.n0 = at / rows * kColumns;
      t.k0 = p.offsets[t.group], t.k_end = p.offsets[t.group + 1];
      t.shares_b = first % rows + 1 < rows;
    } else {
      const int row = pair / columns * 2 + rank;
      const int4 entry = p.row_tiles[1 + min(row, rows - 1)];
      t.group = entry.x, t.m0 = row < rows ? entry.y : entry.z, t.m_end = entry.z;
      t.n0 = pair % columns * kColumns;
      t.k0 = 0, t.k_end = p.k;
      t.shares_b = p.row_tiles[1 + min(row ^ 1, rows - 1)].x == entry.x;
    }
    return t;
  }
};
template <GroupedKind kKind>
int64_t max_pairs(const GroupedProduct& p) {
  const int64_t columns = blocks_for(p.n, kColumns);
  if (kKind == GroupedKind::backward_weight) return p.groups * ((blocks_for(p.m, kRows) * columns + 1) / 2);
  return (max_row_tiles(p) + 1) / 2 * columns;
}

/// By one thread of block 0: the pair that next_pair gives all warps of both blocks in this turn.
DEVICE_INLINE void hand_on(Barriers* bar, unsigned turn, int pair) {
  const unsigned slot = turn % kSlots;
  mbarrier_wait(bar->pair_empty + slot, turn / kSlots % 2 ^ 1);
  for (unsigned rank = 0; rank < kPair; ++rank) {
    const uint32_t full = cluster_address(bar->pair_full + slot, rank);
    mbarrier_arrive_expect_tx_cluster(full, sizeof(int));
    store_async(cluster_address(bar->pair + slot, rank), pair, full);
  }
}
/// By a warp, or a single thread: the cluster's pair of this turn; -1 behind the last.
template <bool kByThread = false>
DEVICE_INLINE int next_pair(Barriers* bar, unsigned turn) {
  const unsigned slot = turn % kSlots;
  mbarrier_wait(bar->pair_full + slot, turn / kSlots % 2);
  const int pair = bar->pair[slot];
  if constexpr (!kByThread) __syncwarp();
  if (kByThread || threadIdx.x % 32 == 0) mbarrier_arrive_cluster(cluster_address(bar->pair_empty + slot, 0));
  return kByThread ? pair : uniform(pair);
}

}  // namespace sluice::cuda::grouped
