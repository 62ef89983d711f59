#pragma once
// Common parts of the backward kernels of attention over selected keys.
#include "sparse/tiles.cuh"

namespace sluice::cuda {

struct Backward {
  const nv_bf16 *q, *k, *v, *d_o;
  const float *lse, *delta, *coef0;  // coef0 may be null
  nv_bf16 *dq, *dk, *dv;
  Selected selected;
  TileChoice choice;
  int heads, kv_heads, sets, group_bits;
  float scale;
};

DEVICE_INLINE TileRows tile_rows(const Backward& a, int kv_head, int64_t tile, int rows) {
  const int tokens = rows >> a.group_bits;
  const int64_t t0 = tile * tokens, left = a.selected.queries - t0;
  return {t0,
          a.selected.queries,
          static_cast<int>(left < tokens ? left : tokens) << a.group_bits,
          kv_head << a.group_bits,
          a.heads,
          a.group_bits};
}

/// What products of keys by queries need of a tile of kRows rows, in shared memory.
template <int kRows>
struct RowStatistics {
  float lse[kRows], delta[kRows], coef0[kRows];  // lse in units of log 2
  int first[kRows];                              // the first visible key

  DEVICE_INLINE void load(const Backward& a, const TileRows& of, int r) {
    const int from = min(r, of.rows - 1);
    lse[r] = a.lse[of.statistic(from)] * kLog2e, delta[r] = a.delta[of.statistic(from)];
    coef0[r] = a.coef0 ? a.coef0[of.statistic(from)] : 0.0f;
    first[r] = a.selected.first_key[of.t0 + of.token(from)];
  }
};

/// Gradients of 16 keys, which are a warp's rows, so that weights leave the tensor cores as the left operands
/// of dV += P dO and dK += dS Q: adds what the 32 rows of queries from row0 on contribute. key(i): of this
/// lane's rows i = 0, 1; members(i): bit t: query t of the tile has selected it. k_lane, v_lane: where the
/// lane's fragments of K and V begin; q_tile, do_tile: rows row0 and after.
template <int kDepth, int kRows, class Key, class Members>
DEVICE_INLINE void add_key_gradients(float (&dk)[kDepth / 8][4], float (&dv)[kDepth / 8][4], uint32_t k_lane,
                                     uint32_t v_lane, uint32_t q_tile, uint32_t do_tile,
                                     const RowStatistics<kRows>& rows, int row0, Key&& key, Members&& members,
                                     int group_bits, float scale) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t b_lane = swizzled<kDepth>(fragment_row_t(lane), fragment_chunk_t(lane)),
                 mix_lane = swizzled<kDepth>(fragment_row(lane), fragment_chunk(lane));
  float s[4][4] = {}, dp[4][4] = {};
  multiply_rows<kDepth, 4>(s, k_lane, q_tile + b_lane);  // with more, ptxas spills
  multiply_rows<kDepth, 4>(dp, v_lane, do_tile + b_lane);
  const int keys[2] = {key(0), key(1)};
  const unsigned have[2] = {members(0), members(1)};
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = row0 + 8 * n + 2 * (lane & 3) + e;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float &x = s[n][2 * i + e], &d = dp[n][2 * i + e];
        const bool member = have[i] >> (r >> group_bits) & 1;
        x = member ? ex2(x * scale - rows.lse[r]) : 0.0f;
        d = x * (d - rows.delta[r]) + (member && keys[i] == rows.first[r] ? rows.coef0[r] : 0.0f);
      }
    }
  multiply_weights<kDepth>(dv, s, do_tile + mix_lane);
  multiply_weights<kDepth>(dk, dp, q_tile + mix_lane);
}

/// A warp's 16 rows of accumulators, times a factor, into those of a tile, which it alone reads.
template <int kDepth>
DEVICE_INLINE void write_rows(unsigned char* tile, const float (&acc)[kDepth / 8][4], float factor) {
  __syncwarp();
  store_accumulators<kDepth>(tile, static_cast<int>(threadIdx.x) / 32 * 16, 0, acc, factor, factor);
  __syncwarp();
}

/// dK and dV for keys that few of the queries select: partials.cu.
bool few_select_a_key(const Selected& selected);
void partial_key_gradients(Context& ctx, ScratchScope& scratch, const Backward& a, int64_t depth);

}  // namespace sluice::cuda
