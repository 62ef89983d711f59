#pragma once
// How large the tiles are in which queries go through the union of their keys (union.cuh): whole, or parts of
// kPartRows rows where a tile's queries select different keys. A whole tile of R rows gathers every key of
// its union once, and multiplies R rows with it; a part gathers its own union, and multiplies no rows of
// others.
#include "sparse/union.cuh"

namespace sluice::cuda {

constexpr int kPartRows = 16;

/// A group of 2^(this) query heads shares a key/value head.
inline int group_bits_of(int heads, int kv_heads) {
  int bits = 0;
  while ((1 << bits) < heads / kv_heads) ++bits;
  return bits;
}

/// Rows of a whole tile of groups of 2^group_bits query heads. A tile has a bit for each query: 32 at most.
constexpr int whole_tile_rows(int group_bits) { return group_bits == 0 ? 32 : 64; }

/// Costs of a key of a union, by an estimate from published rates of an H200 at head_dim 128: its rows of K
/// and V, 512 bytes, take 21 cycles of a multiprocessor's share of the second cache; products and weights of
/// 64 rows take 19 cycles, of which a part hides behind the gather, those of 16 rows 5, all hidden. To be set
/// by `sluice bench sparse` on a GPU.
constexpr int kWholeTileCost = 5, kPartCost = 4;

/// Which tiles are divided into parts.
struct TileChoice {
  const int* divided;  // (G, tiles): 0 or 1; null: none
  int tiles, whole_tokens;

  /// Whether a kernel with tiles of `rows` rows works on the one that begins at query t0.
  DEVICE_INLINE bool mine(int rows, int set, int64_t t0) const {
    const bool parts = divided && divided[set * tiles + static_cast<int>(t0) / whole_tokens] != 0;
    return parts == (rows == kPartRows);
  }
};

/// Compares the costs for every tile. No tile is divided whose group has more than kPartRows heads.
TileChoice choose_tiles(Context& ctx, ScratchScope& scratch, const Selected& selected, int sets,
                        int group_bits);

}  // namespace sluice::cuda
