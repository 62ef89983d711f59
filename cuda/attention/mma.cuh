#pragma once
// Common parts of attention's forward and backward on mma.sync m16n8k16: tiles of bf16 rows in shared memory,
// and their fragments.
//
// A tile of rows of kDepth elements is swizzled: 16-byte chunk c of row r lies at chunk c ^ (r % 8), and
// where a row has but four chunks, at c ^ (r / 2 % 4). Eight rows of one chunk, an ldmatrix phase, then fall
// into 32 different banks, and so do copies of whole rows. The fragment 16 elements further along a row is at
// the address ^ 32.
#include "common/ptx.cuh"

namespace sluice::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

template <int kDepth>
DEVICE_INLINE uint32_t swizzled(int row, int chunk) {
  static_assert(kDepth == 32 || kDepth % 64 == 0);
  return static_cast<uint32_t>(row * kDepth * 2 + ((chunk ^ (kDepth == 32 ? row >> 1 & 3 : row & 7)) << 4));
}

/// kRows rows from src into a tile by cp.async, zeros from row `valid` on.
template <int kRows, int kDepth, int kThreads>
DEVICE_INLINE void load_rows_async(uint32_t tile, const nv_bf16* src, int row_stride, int valid) {
  constexpr int kChunks = kDepth / 8, kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0);
  const int chunk = static_cast<int>(threadIdx.x) % kChunks, first = static_cast<int>(threadIdx.x) / kChunks;
  src += static_cast<int64_t>(first) * row_stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    // Nothing is read for rows that do not exist.
    cp_async_16(tile + swizzled<kDepth>(first + i * kStep, chunk), src, first + i * kStep < valid);
    src += kStep * row_stride;
  }
}

// Where this lane's row lies in the ldmatrix of a 16 x 16 piece, in rows and chunks from the piece's corner.
/// A (m, k) stored [m][k]; and B (k, n) stored [k][n], with trans: two n-tiles.
DEVICE_INLINE int fragment_row(int lane) { return lane & 15; }
DEVICE_INLINE int fragment_chunk(int lane) { return lane >> 4; }
/// B (k, n) stored [n][k], two n-tiles; and A (m, k) stored [k][m], with trans.
DEVICE_INLINE int fragment_row_t(int lane) { return (lane & 7) + ((lane >> 4) << 3); }
DEVICE_INLINE int fragment_chunk_t(int lane) { return (lane >> 3) & 1; }

/// The accumulators of two neighbouring n-tiles (16 x 16) as an A fragment of the next product.
DEVICE_INLINE void accumulators_to_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack_bf16(left[0], left[1]), a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]), a[3] = pack_bf16(right[2], right[3]);
}

/// 16 rows of accumulators (kTiles n-tiles) times a factor for rows 0-7 and 8-15 into a swizzled tile, from
/// chunk `chunk` on.
template <int kDepth, int kTiles>
DEVICE_INLINE void store_accumulators(unsigned char* tile, int row, int chunk, const float (&acc)[kTiles][4],
                                      float low, float high) {
  const int lane = static_cast<int>(threadIdx.x) & 31, r = row + (lane >> 2), within = (lane & 3) * 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    *reinterpret_cast<uint32_t*>(tile + swizzled<kDepth>(r, chunk + n) + within) =
        pack_bf16(acc[n][0] * low, acc[n][1] * low);
    *reinterpret_cast<uint32_t*>(tile + swizzled<kDepth>(r + 8, chunk + n) + within) =
        pack_bf16(acc[n][2] * high, acc[n][3] * high);
  }
}

/// acc (16 rows of a warp x 8 kTiles) += a b^T, over kDepth. a_lane and b_lane: where this lane's fragments
/// begin, a's of fragment_row, b's, stored as rows, of fragment_row_t. kUnroll: of the loop over depth.
template <int kDepth, int kUnroll = kDepth / 16, int kTiles>
DEVICE_INLINE void multiply_rows(float (&acc)[kTiles][4], uint32_t a_lane, uint32_t b_lane) {
#pragma unroll kUnroll
  for (int d = 0; d < kDepth / 16; ++d) {
    uint32_t a[4];
    ldmatrix_x4(a, a_lane ^ (d << 5));
#pragma unroll
    for (int n = 0; n < kTiles / 2; ++n) {
      uint32_t f[4];
      ldmatrix_x4(f, (b_lane ^ (d << 5)) + n * 16 * 2 * kDepth);
      mma_16816(acc[2 * n], a, f[0], f[1]);
      mma_16816(acc[2 * n + 1], a, f[2], f[3]);
    }
  }
}

/// acc (16 x kDepth) += p (16 x 8 kTiles, accumulators) b, whose rows of kDepth lie in a tile. b_lane: of
/// fragment_row.
template <int kDepth, int kTiles>
DEVICE_INLINE void multiply_weights(float (&acc)[kDepth / 8][4], const float (&p)[kTiles][4],
                                    uint32_t b_lane) {
#pragma unroll
  for (int c = 0; c < kTiles / 2; ++c) {
    uint32_t a[4];
    accumulators_to_a(a, p[2 * c], p[2 * c + 1]);
#pragma unroll
    for (int n = 0; n < kDepth / 16; ++n) {
      uint32_t f[4];
      ldmatrix_x4_trans(f, (b_lane ^ (n << 5)) + c * 16 * 2 * kDepth);
      mma_16816(acc[2 * n], a, f[0], f[1]);
      mma_16816(acc[2 * n + 1], a, f[2], f[3]);
    }
  }
}

}  // namespace sluice::cuda
