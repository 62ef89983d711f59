#pragma once
// Common parts of the kernels of attention over selected keys: rows gathered into tiles, and what rows are.
#include "attention/mma.cuh"
#include "common/launch.h"
#include "sparse/tile_choice.cuh"

namespace sluice::cuda {

/// A tile of rows: consecutive queries from t0 on times the group of query heads of one key/value head. Row r
/// is query t0 + r / group, head head0 + r % group: heads of a query are adjacent in memory.
struct TileRows {
  int64_t t0, queries;
  int rows, head0, heads, group_bits;

  DEVICE_INLINE int token(int r) const { return r >> group_bits; }
  /// Of (Tq, H).
  DEVICE_INLINE int64_t row(int r) const {
    return (t0 + token(r)) * heads + head0 + (r & ((1 << group_bits) - 1));
  }
  /// Of (H, Tq).
  DEVICE_INLINE int64_t statistic(int r) const {
    return (head0 + (r & ((1 << group_bits) - 1))) * queries + t0 + token(r);
  }
};

/// Rows of `src` (Tq, H, D) into a tile by cp.async, zeros behind the last.
template <int kRows, int kDepth, int kThreads>
DEVICE_INLINE void load_tile_rows_async(uint32_t tile, const nv_bf16* src, const TileRows& of) {
  constexpr int kChunks = kDepth / 8, kStep = kThreads / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks, first = static_cast<int>(threadIdx.x) / kChunks;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const int r = first + i * kStep;
    cp_async_16(tile + swizzled<kDepth>(r, chunk), src + of.row(min(r, of.rows - 1)) * kDepth + chunk * 8,
                r < of.rows);
  }
}

/// Rows keys[0, valid) of src into a tile by cp.async, zeros behind them.
template <int kRows, int kDepth, int kThreads>
DEVICE_INLINE void gather_rows_async(uint32_t tile, const nv_bf16* src, int64_t row_stride, const int* keys,
                                     int valid) {
  constexpr int kChunks = kDepth / 8, kStep = kThreads / kChunks;
  const int chunk = static_cast<int>(threadIdx.x) % kChunks, first = static_cast<int>(threadIdx.x) / kChunks;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const int r = first + i * kStep;
    cp_async_16(tile + swizzled<kDepth>(r, chunk), src + keys[min(r, valid - 1)] * row_stride + chunk * 8,
                r < valid);
  }
}

/// Keys and values of tile j of a list, which have arrived when this returns to all threads of the block. k
/// and v: of the key/value head, whose rows are `row_stride` apart.
template <int kRows, int kDepth, int kThreads, class Keys>
DEVICE_INLINE void gather_keys_and_values(uint32_t k_tile, uint32_t v_tile, const nv_bf16* k,
                                          const nv_bf16* v, int64_t row_stride, const Keys& list, int j) {
  gather_rows_async<kRows, kDepth, kThreads>(k_tile, k, row_stride, list.keys(j), list.valid(j));
  gather_rows_async<kRows, kDepth, kThreads>(v_tile, v, row_stride, list.keys(j), list.valid(j));
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
}

/// Shared memory of a block whose warps own 16 rows each and go through the union of their queries' keys:
/// kTiles tiles of kRows rows, one of keys, one of values, and the list of keys. Blocks of one warp have
/// small tiles of keys: many of them share a multiprocessor, and hide each other's gathers.
template <int kDepth, int kRows, int kTiles>
struct UnionTiles {
  static constexpr int kThreads = 2 * kRows, kRowBytes = 2 * kDepth, kTile = kRows * kRowBytes;
  using Keys = std::conditional_t<kRows == kPartRows, KeyUnion<kThreads, 32, 256>, KeyUnion<kThreads>>;
  static constexpr int kKeys = Keys::kTile;
  static constexpr int kK = kTiles * kTile, kV = kK + kKeys * kRowBytes, kList = kV + kKeys * kRowBytes;
  static constexpr size_t kSmem = kList + sizeof(typename Keys::Shared);

  /// A block per tile of queries and key/value head.
  static LaunchConfig config(int kv_heads, int64_t queries, int group_bits) {
    LaunchConfig c;
    c.grid = dim3(static_cast<unsigned>(kv_heads) * blocks_for(queries, kRows >> group_bits));
    c.block = dim3(kThreads), c.smem = kSmem;
    return c;
  }
};

/// Accumulators of this warp's 16 rows, times a factor for rows 0-7 and 8-15, to dst (Tq, H, D), by way of
/// its rows of a tile, which it alone reads.
template <int kDepth>
DEVICE_INLINE void write_tile_rows(nv_bf16* dst, unsigned char* tile, const float (&acc)[kDepth / 8][4],
                                   float low, float high, const TileRows& of) {
  constexpr int kChunks = kDepth / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  __syncwarp();
  store_accumulators<kDepth>(tile, warp * 16, 0, acc, low, high);
  __syncwarp();
#pragma unroll 2
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int r = warp * 16 + i / kChunks, chunk = i % kChunks;
    if (r >= of.rows) break;
    store_vec<8>(dst + of.row(r) * kDepth + chunk * 8,
                 *reinterpret_cast<const Vec16<nv_bf16>*>(tile + swizzled<kDepth>(r, chunk)));
  }
}

}  // namespace sluice::cuda
