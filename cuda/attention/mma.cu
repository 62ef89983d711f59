// Attention's forward for every GPU since sm_80 (FlashAttention-2, Dao 2023, on mma.sync m16n8k16 in bf16).
// A block owns kRows queries of one head, a warp kBlocks x 16 of them, so that a fragment of K or V serves
// kBlocks products; it iterates over the keys from the tile's first visible one to the diagonal. Blocks of
// late queries, which attend to most keys, come first, and the heads of one tile are adjacent, which share
// keys in L2. K and V have one buffer each, and each is filled while the other is used: V_j is loaded during
// S = Q K_j, K_{j+1} during the softmax and P V_j. The output is written through the rows of Q in shared
// memory, with its sink and gate, in 16-byte stores. Bound by the tensor cores, then by exp. Not yet run on a
// GPU.
#include "attention/kernels.h"
#include "attention/mma.cuh"
#include "common/math.cuh"

namespace sluice::cuda {
namespace {

template <int kDepth_, int kWarps_, int kBlocks_, int kKeys_, int kMinBlocks_>
struct Forward {
  static constexpr int kDepth = kDepth_, kWarps = kWarps_, kBlocks = kBlocks_, kKeys = kKeys_,
                       kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = 32 * kWarps, kRows = 16 * kBlocks * kWarps;
  static constexpr int kRowBytes = 2 * kDepth;
  static constexpr int kK = kRows * kRowBytes, kV = kK + kKeys * kRowBytes, kLse = kV + kKeys * kRowBytes;
  static constexpr int kSmem = kLse + kRows * 4;  // always below 99 KB, which every GPU has
};

/// o, and y = gate(sigmoid(lse - sink) o), of this warp's rows, which lie in the tile of Q.
template <class F>
DEVICE_INLINE void store_output(const AttentionForward& a, const unsigned char* q_tile, const float* lse_tile,
                                int q0, int head) {
  constexpr int kChunks = F::kDepth / 8, kWarpRows = 16 * F::kBlocks;
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const float sink = a.sink ? to_float(a.sink[head]) : 0.0f;
  const bool multiply = a.kind.combine == GateCombine::multiply;
#pragma unroll 2
  for (int i = lane; i < kWarpRows * kChunks; i += 32) {
    const int row = warp * kWarpRows + i / kChunks, chunk = i % kChunks;
    if (q0 + row >= a.queries) break;
    const int64_t statistic = static_cast<int64_t>(q0 + row) * a.heads + head,
                  at = statistic * F::kDepth + chunk * 8;
    Vec16<nv_bf16> o = *reinterpret_cast<const Vec16<nv_bf16>*>(q_tile + swizzled<F::kDepth>(row, chunk));
    store_vec<8>(a.o + at, o);
    if (!a.y) continue;
    const float share = a.sink ? sigmoid(lse_tile[row] - sink) : 1.0f;
    if (!a.gate) {
#pragma unroll
      for (int e = 0; e < 8; ++e) o.v[e] = __float2bfloat16_rn(share * to_float(o.v[e]));
    } else if (a.headwise) {
      const float z = to_float(a.gate[statistic]), s = activate(a.kind.activation, z, sigmoid(z));
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float x = share * to_float(o.v[e]);
        o.v[e] = __float2bfloat16_rn(multiply ? x * s : x + s);
      }
    } else {
      const Vec16<nv_bf16> z = load_vec<8>(a.gate + at);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float logit = to_float(z.v[e]), s = activate(a.kind.activation, logit, sigmoid(logit));
        const float x = share * to_float(o.v[e]);
        o.v[e] = __float2bfloat16_rn(multiply ? x * s : x + s);
      }
    }
    store_vec<8>(a.y + at, o);
  }
}

template <class F>
__global__ void __launch_bounds__(F::kThreads, F::kMinBlocks)
    attention_mma_forward_kernel(AttentionForward a) {
  constexpr int kDepth = F::kDepth, kKeys = F::kKeys, kBlocks = F::kBlocks;
  DYN_SMEM(unsigned char, smem, 1024);
  const uint32_t base = smem_addr(smem), k_tile = base + F::kK, v_tile = base + F::kV;
  float* const lse_tile = reinterpret_cast<float*>(smem + F::kLse);
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const int head = static_cast<int>(blockIdx.x), kv_head = head / (a.heads / a.kv_heads);
  const int queries = static_cast<int>(a.queries);
  const int q0 = static_cast<int>(gridDim.y - 1 - blockIdx.y) * F::kRows, rows = min(F::kRows, queries - q0);
  const int first_min = a.visible.first[q0], first_max = a.visible.first[q0 + rows - 1],
            last_min = a.visible.own.of(q0), key_end = a.visible.own.of(q0 + rows - 1) + 1;
  const auto load_keys = [&](uint32_t tile, const nv_bf16* src, int k0) {
    load_rows_async<kKeys, kDepth, F::kThreads>(
        tile, src + (static_cast<int64_t>(k0) * a.kv_heads + kv_head) * kDepth, a.kv_heads * kDepth,
        static_cast<int>(a.keys) - k0);
    cp_async_commit();
  };

  load_rows_async<F::kRows, kDepth, F::kThreads>(
      base, a.q + (static_cast<int64_t>(q0) * a.heads + head) * kDepth, a.heads * kDepth, rows);
  load_keys(k_tile, a.k, first_min);

  // Row i of block b of this lane is query q0 + row(b, i); rows past the end have the mask of the last one.
  const auto row_of = [&](int b, int i) { return (warp * kBlocks + b) * 16 + (lane >> 2) + 8 * i; };
  // Where this lane's fragments begin; 16 elements further along the depth is ^ 32 n, 16 rows further + 16
  // row bytes.
  const uint32_t q_lane =
      base + swizzled<kDepth>(warp * kBlocks * 16 + fragment_row(lane), fragment_chunk(lane));
  const uint32_t k_lane = k_tile + swizzled<kDepth>(fragment_row_t(lane), fragment_chunk_t(lane));
  const uint32_t v_lane = v_tile + swizzled<kDepth>(fragment_row(lane), fragment_chunk(lane));
  const float scale = a.scale * kLog2e;
  float acc[kBlocks][kDepth / 8][4] = {};
  float m[kBlocks][2], l[kBlocks][2];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) m[b][0] = m[b][1] = -INFINITY, l[b][0] = l[b][1] = 0;

  for (int k0 = first_min; k0 < key_end; k0 += kKeys) {
    cp_async_wait<0>();
    __syncthreads();  // K_j has arrived, and V_{j-1} is no longer read
    load_keys(v_tile, a.v, k0);

    float s[kBlocks][kKeys / 8][4] = {};
#pragma unroll
    for (int d = 0; d < kDepth / 16; ++d) {
      uint32_t q[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) ldmatrix_x4(q[b], (q_lane ^ (d << 5)) + b * 16 * F::kRowBytes);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t f[4];
        ldmatrix_x4(f, (k_lane ^ (d << 5)) + n * 16 * F::kRowBytes);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          mma_16816(s[b][2 * n], q[b], f[0], f[1]);
          mma_16816(s[b][2 * n + 1], q[b], f[2], f[3]);
        }
      }
    }

    cp_async_wait<0>();
    __syncthreads();  // V_j has arrived, and K_j is no longer read
    if (k0 + kKeys < key_end) load_keys(k_tile, a.k, k0 + kKeys);

    // Only tiles at the edge of some row's keys are masked; z0 is found in the same tiles.
    if (k0 <= first_max || k0 + kKeys - 1 > last_min) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int query = min(q0 + row_of(b, i), queries - 1);
          const int column = k0 + 2 * (lane & 3), first = a.visible.first[query] - column,
                    last = a.visible.own.of(query) - column;
          float z = 0;
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& x = s[b][n][2 * i + e];
              if (8 * n + e == first) z = x;
              if (8 * n + e < first || 8 * n + e > last) x = -INFINITY;
            }
          if (a.z0 && first >= 0 && first < kKeys && first % 8 < 2 && q0 + row_of(b, i) < queries)
            a.z0[static_cast<int64_t>(head) * queries + query] = z * scale * kLn2;
        }
    }

#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = m[b][i];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) top = fmaxf(top, fmaxf(s[b][n][2 * i], s[b][n][2 * i + 1]));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
        const float shift = softmax_base(top, scale), rescale = softmax_rescale(m[b][i], scale, shift);
        m[b][i] = top;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[b][n][2 * i + e];
            x = ex2(x * scale - shift);
            sum += x;
          }
        l[b][i] = l[b][i] * rescale + sum;
#pragma unroll
        for (int n = 0; n < kDepth / 8; ++n) acc[b][n][2 * i] *= rescale, acc[b][n][2 * i + 1] *= rescale;
      }

#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      uint32_t p[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) accumulators_to_a(p[b], s[b][2 * j], s[b][2 * j + 1]);
#pragma unroll
      for (int n = 0; n < kDepth / 16; ++n) {
        uint32_t f[4];
        ldmatrix_x4_trans(f, (v_lane ^ (n << 5)) + j * 16 * F::kRowBytes);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          mma_16816(acc[b][2 * n], p[b], f[0], f[1]);
          mma_16816(acc[b][2 * n + 1], p[b], f[2], f[3]);
        }
      }
    }
  }

  // Each warp overwrites its rows of Q, which no other warp reads, with its rows of O.
  __syncwarp();
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = l[b][i];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      sum = fmaxf(sum, 1.0f);  // the largest term is 1 but for rounding: with it lse >= z0
      inverse[i] = __fdividef(1.0f, sum);
      const float lse = softmax_lse(m[b][i], scale, sum) * kLn2;
      const int row = row_of(b, i);
      if ((lane & 3) == 0) {
        lse_tile[row] = lse;
        if (row < rows) a.lse[head * a.queries + q0 + row] = lse;
      }
    }
    store_accumulators<kDepth>(smem, (warp * kBlocks + b) * 16, 0, acc[b], inverse[0], inverse[1]);
  }
  __syncwarp();
  store_output<F>(a, smem, lse_tile, q0, head);
}

template <class F>
void launch_forward(Context& ctx, const AttentionForward& a) {
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(a.heads), blocks_for(a.queries, F::kRows));
  config.block = dim3(F::kThreads);
  config.smem = F::kSmem;
  launch(ctx, "attention_mma_forward", config, attention_mma_forward_kernel<F>, a);
}

}  // namespace

void attention_mma_forward(Context& ctx, const AttentionForward& a) {
  if (ctx.dry_run) return;
  // depth, warps, blocks of 16 rows per warp, keys of a tile, blocks per multiprocessor; with more keys of
  // depth 128 ptxas spills
  if (a.head_dim == 64)
    launch_forward<Forward<64, 4, 2, 64, 2>>(ctx, a);
  else if (a.head_dim == 128)
    launch_forward<Forward<128, 4, 2, 32, 2>>(ctx, a);
  else
    launch_forward<Forward<256, 8, 1, 32, 1>>(ctx, a);
}

}  // namespace sluice::cuda
