#pragma once
// Interface between the ops in grouped_linear.cu and their kernels: f32 arithmetic (grouped_linear.cu), bf16
// on tensor cores since sm_80 (mma.cu), bf16 on Hopper (hopper.cu).
//   forward          out (rows, n)       = a (rows, k) b_g (n, k)^T      a = x, b = W
//   backward_input   out (rows, n)       = a (rows, k) b_g (k, n)        a = dy, b = W
//   backward_weight  out_g (m, n) f32   += a_g (rows of g, m)^T b_g (rows of g, n)    a = dy, b = x
// A tile is a rectangle of the output of one group, with its whole contraction. Which tiles there are is
// known on the device alone. Where groups are rows of the output, a small kernel writes the list of row tiles
// (plan_row_tiles), at the price of one more launch for all blocks: no block has to search, and the number of
// groups has no bound. Of backward_weight every group has the same tiles, and blocks pass over those of
// groups without rows. Blocks are persistent and take tiles in turns: tile i, i + blocks, ..., or, on Hopper,
// whichever is next. Neighbouring tiles are columns of the same rows, then the next rows of the same group,
// so that the blocks at work share a group's weights and rows in L2.
#include <algorithm>

#include "common/launch.h"

namespace sluice::cuda {

enum class GroupedKind { forward, backward_input, backward_weight };

struct GroupedProduct {
  const void *a, *b;
  void* out;
  const int *a_index, *b_index;  // null: row r is row r. b_index for backward_weight alone
  const int* offsets;            // (groups + 1)
  const int4* row_tiles;         // of plan_row_tiles; not for backward_weight
  int* counter;                  // 0: tiles that blocks have taken, but for the first of each
  int groups, rows, m, n, k;     // rows: the worst case; m for backward_weight alone, k for the others
  int64_t a_rows, b_rows;        // of a and b in memory; b_rows for backward_weight alone
};

/// Rows of an output tile, in every kernel.
constexpr int kGroupedTileRows = 128;

/// The tile of a block.
struct GroupedTile {
  int group;
  int m0, m_end;  // rows of the output: of all groups together, or of this group's weight
  int n0;         // first column
  int k0, k_end;  // contraction: columns of a, or rows of a and b
};

/// Upper bound on the number of tiles for any offsets: each group may end within a tile.
inline int64_t max_row_tiles(const GroupedProduct& p) {
  return blocks_for(p.rows, kGroupedTileRows) + p.groups;
}
template <GroupedKind kKind>
int64_t max_tiles(const GroupedProduct& p, int columns) {
  if (kKind == GroupedKind::backward_weight)
    return static_cast<int64_t>(p.groups) * blocks_for(p.m, kGroupedTileRows) * blocks_for(p.n, columns);
  return max_row_tiles(p) * blocks_for(p.n, columns);
}

/// Tiles with kColumns columns; the first entry of the list says how many rows of them there are.
template <GroupedKind kKind, int kColumns>
DEVICE_INLINE int num_tiles(const GroupedProduct& p) {
  const int columns = (p.n + kColumns - 1) / kColumns;
  if constexpr (kKind == GroupedKind::backward_weight)
    return p.groups * ((p.m + kGroupedTileRows - 1) / kGroupedTileRows) * columns;
  else
    return p.row_tiles[0].x * columns;
}
template <GroupedKind kKind, int kColumns>
DEVICE_INLINE GroupedTile locate(const GroupedProduct& p, int tile) {
  const int columns = (p.n + kColumns - 1) / kColumns;
  GroupedTile t;
  t.n0 = tile % columns * kColumns;
  if constexpr (kKind == GroupedKind::backward_weight) {
    const int rows = (p.m + kGroupedTileRows - 1) / kGroupedTileRows, of_all = tile / columns;
    t.group = of_all / rows;
    t.m0 = of_all % rows * kGroupedTileRows, t.m_end = p.m;
    t.k0 = p.offsets[t.group], t.k_end = p.offsets[t.group + 1];
  } else {
    const int4 entry = p.row_tiles[1 + tile / columns];
    t.group = entry.x, t.m0 = entry.y, t.m_end = entry.z;
    t.k0 = 0, t.k_end = p.k;
  }
  return t;
}

/// bf16 kernels; out is bf16, or f32 of backward_weight.
void grouped_linear_mma(Context& ctx, GroupedKind kind, const GroupedProduct& p);
/// sm_90 only, and only with whole_vectors.
void grouped_linear_hopper(Context& ctx, GroupedKind kind, const GroupedProduct& p);
/// Whether every row consists of whole 16-byte vectors, as required by TMA and by the fast path of mma.
inline bool whole_vectors(const GroupedProduct& p) {
  const auto aligned = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  return p.m % 8 == 0 && p.n % 8 == 0 && p.k % 8 == 0 && aligned(p.a) && aligned(p.b) && aligned(p.out);
}

}  // namespace sluice::cuda
