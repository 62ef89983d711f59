// Attention's backward for every GPU since sm_80 (FlashAttention-2, Dao 2023, on mma.sync m16n8k16 in bf16).
// A block owns kKeys keys of one key head and iterates over the tiles of kQueries queries to which they are
// visible, for every query head of the group in turn, from the last tile to the diagonal. A warp owns 16
// keys: with keys as rows, S and dP leave the tensor cores as the left operands of dV += P dO and dK += dS Q,
// which therefore stay in registers. Depth 256 is too much for one warp's registers: kSplit warps share 16
// keys, compute scores of half the queries each, meet in shared memory, and own half the channels of dK and
// dV. dS goes through shared memory to dQ = dS K, whose rows belong to queries.
//
// dQ is summed in f32 in global memory, in the order of the registers, so that additions are coalesced.
// Deterministic: a tile's additions wait for their turn in the order of key tiles; the first one stores. A
// block takes its keys from a counter, so that the blocks it waits for have been started. Bound by the tensor
// cores, closely followed by shared memory. Not yet run on a GPU.
#include "attention/kernels.h"
#include "attention/mma.cuh"

namespace sluice::cuda {
namespace {

template <int kDepth_, int kKeys_, int kQueries_, int kSplit_, int kStages_>
struct Backward {
  static constexpr int kDepth = kDepth_, kKeys = kKeys_, kQueries = kQueries_, kSplit = kSplit_,
                       kStages = kStages_;
  static constexpr int kWarps = kKeys / 16 * kSplit, kThreads = 32 * kWarps;
  static constexpr int kRowBytes = 2 * kDepth, kScoreBytes = 2 * kQueries;
  static constexpr int kOwnQueries = kQueries / kSplit,
                       kOwnDepth = kDepth / kSplit;  // of a warp: of S and dP, of dK and dV
  static constexpr int kQueryWarps = kQueries / 16, kDepthWarps = kWarps / kQueryWarps;  // the warps over dQ
  static constexpr int kDqDepth = kDepth / kDepthWarps;
  static constexpr int kUnroll =
      kDepth == 256 ? 2 : 4;  // of the loop over depth in S and dP: other numbers spill
  static constexpr int kStatistics =
      (4 * kQueries + kThreads - 1) / kThreads;  // of a thread: lse, delta, first, coef0
  // Bytes of shared memory: K, V, then per stage Q and dO, then dS, P where it is shared, statistics, the
  // number of its keys.
  static constexpr int kV = kKeys * kRowBytes, kQ = 2 * kV, kStage = 2 * kQueries * kRowBytes;
  static constexpr int kDs = kQ + kStages * kStage, kP = kDs + (kSplit > 1 ? kKeys * kScoreBytes : 0);
  static constexpr int kStatistic = kP + kKeys * kScoreBytes, kTaken = kStatistic + 4 * kQueries * 4,
                       kSmem = kTaken + 16;
  static_assert(kKeys % kQueries == 0 && kWarps % kQueryWarps == 0 && kQueries % (16 * kSplit) == 0);
};

struct DqSum {
  float* sum;  // (H, query tiles) of kQueries * kDepth, in the order of the registers
  int* turn;   // (H, query tiles): number of additions; null if their order does not matter
  int* counter;  // next item, a key head of a key tile, where the order matters
  int tiles;
};

/// Element i of this thread's dQ accumulators; neighbouring threads are neighbours in memory.
template <class B>
DEVICE_INLINE float* dq_element(const DqSum& dq, int head, int tile, int i) {
  return dq.sum + (static_cast<int64_t>(head) * dq.tiles + tile) * (B::kQueries * B::kDepth) +
         i * B::kThreads + threadIdx.x;
}

template <class B>
__global__ void __launch_bounds__(B::kThreads, 1)
    attention_mma_backward_kernel(AttentionBackward a, DqSum dq) {
  constexpr int kDepth = B::kDepth, kKeys = B::kKeys, kQueries = B::kQueries, kOwnQueries = B::kOwnQueries;
  constexpr int kRowBytes = B::kRowBytes, kScoreBytes = B::kScoreBytes;
  DYN_SMEM(unsigned char, smem, 1024);
  const uint32_t base = smem_addr(smem);
  float* const statistics = reinterpret_cast<float*>(smem + B::kStatistic);
  const int tid = static_cast<int>(threadIdx.x), lane = tid & 31, warp = tid >> 5;
  const int key_row = warp / B::kSplit * 16,
            part = warp % B::kSplit;  // this warp's keys, and its share of them
  // Read again wherever they are needed, rather than kept in registers, of which there are none left.
  volatile int* const taken = reinterpret_cast<volatile int*>(smem + B::kTaken);
  if (tid == 0) {
    const int item = dq.turn ? atomicAdd(dq.counter, 1) : static_cast<int>(blockIdx.x);
    taken[0] = item % a.kv_heads;
    taken[1] = item / a.kv_heads;
  }
  __syncthreads();
  const auto kv_head = [&] { return taken[0]; };
  const auto key_tile = [&] { return taken[1]; };
  const auto first_key = [&] { return key_tile() * kKeys; };
  const int group = a.heads / a.kv_heads;
  const int queries = static_cast<int>(a.queries), keys = static_cast<int>(a.keys);

  // Query tiles [first_tile, last_tile], if any: neither first nor own keys decrease.
  const int first_tile = a.visible.own.first_query(first_key()) / kQueries, key_end = first_key() + kKeys;
  int last_tile = (queries - 1) / kQueries;
  for (int low = first_tile - 1; low < last_tile;) {
    const int middle =
        a.visible.first[last_tile * kQueries] < key_end ? last_tile : (low + last_tile + 1) / 2;
    if (a.visible.first[middle * kQueries] < key_end)
      low = middle;
    else
      last_tile = middle - 1;
  }
  const int tiles = last_tile - first_tile + 1, steps = tiles * group;
  const auto head_of = [&](int step) { return kv_head() * group + step / tiles; };
  const auto tile_of = [&](int step) { return last_tile - step % tiles; };

  // A step's rows go to their stage by cp.async, its statistics by way of registers.
  float statistic[B::kStatistics];
  const auto load_step = [&](int step) {
    const int head = head_of(step), q0 = tile_of(step) * kQueries;
    const uint32_t stage = base + B::kQ + step % B::kStages * B::kStage;
    const int64_t at = (static_cast<int64_t>(q0) * a.heads + head) * kDepth;
    load_rows_async<kQueries, kDepth, B::kThreads>(stage, a.q + at, a.heads * kDepth, queries - q0);
    load_rows_async<kQueries, kDepth, B::kThreads>(stage + kQueries * kRowBytes, a.d_o + at, a.heads * kDepth,
                                                   queries - q0);
    cp_async_commit();
#pragma unroll
    for (int i = 0; i < B::kStatistics; ++i) {
      const int which = (tid + i * B::kThreads) / kQueries, query = q0 + (tid + i * B::kThreads) % kQueries;
      const int64_t row = static_cast<int64_t>(head) * queries + query;
      if (query >= queries)
        statistic[i] = which == 0 ? INFINITY : 0.0f;  // P = 0
      else if (which == 0)
        statistic[i] = a.lse[row] * kLog2e;
      else if (which == 1)
        statistic[i] = a.delta[row];
      else if (which == 2)
        statistic[i] = __int_as_float(a.visible.first[query]);
      else if (which == 3)
        statistic[i] = a.coef0 ? a.coef0[row] : 0.0f;
    }
  };

  const int64_t key_at = (static_cast<int64_t>(first_key()) * a.kv_heads + kv_head()) * kDepth;
  load_rows_async<kKeys, kDepth, B::kThreads>(base, a.k + key_at, a.kv_heads * kDepth, keys - first_key());
  load_rows_async<kKeys, kDepth, B::kThreads>(base + B::kV, a.v + key_at, a.kv_heads * kDepth,
                                              keys - first_key());
  if (steps > 0)
    load_step(0);
  else
    cp_async_commit();  // of the keys, which no query sees

  // Where this lane's fragments begin (see mma.cuh).
  const uint32_t by_rows = swizzled<kDepth>(fragment_row(lane), fragment_chunk(lane));
  const uint32_t by_rows_t = swizzled<kDepth>(fragment_row_t(lane), fragment_chunk_t(lane));
  const uint32_t key_lane = base + key_row * kRowBytes + by_rows;
  const float scale = a.scale * kLog2e;
  float dk[B::kOwnDepth / 8][4] = {}, dv[B::kOwnDepth / 8][4] = {};
  int turn = 0;

  for (int step = 0; step < steps; ++step) {
    const uint32_t q_tile = base + B::kQ + step % B::kStages * B::kStage,
                   d_o_tile = q_tile + kQueries * kRowBytes;
    const int head = head_of(step), tile = tile_of(step), q0 = tile * kQueries;
    cp_async_wait<0>();
#pragma unroll
    for (int i = 0; i < B::kStatistics; ++i)
      if (const int at = tid + i * B::kThreads; at < 4 * kQueries) statistics[at] = statistic[i];
    __syncthreads();  // this step's rows have arrived; dS and the other stage are no longer read
    if (dq.turn && tid == 0 && step > 0)
      store_release(dq.turn + static_cast<int64_t>(head_of(step - 1)) * dq.tiles + tile_of(step - 1),
                    turn + 1);
    if (B::kStages > 1 && step + 1 < steps) load_step(step + 1);

    // S and dP of 16 keys and this warp's queries.
    float s[kOwnQueries / 8][4] = {}, dp[kOwnQueries / 8][4] = {};
    const uint32_t q_lane = q_tile + part * kOwnQueries * kRowBytes + by_rows_t;
    const auto scores = [&](float(&out)[kOwnQueries / 8][4], uint32_t left, uint32_t right) {
#pragma unroll B::kUnroll
      for (int d = 0; d < kDepth / 16; ++d) {
        uint32_t f[4];
        ldmatrix_x4(f, left ^ (d << 5));
#pragma unroll
        for (int n = 0; n < kOwnQueries / 16; ++n) {
          uint32_t g[4];
          ldmatrix_x4(g, (right ^ (d << 5)) + n * 16 * kRowBytes);
          mma_16816(out[2 * n], f, g[0], g[1]);
          mma_16816(out[2 * n + 1], f, g[2], g[3]);
        }
      }
    };
    scores(s, key_lane, q_lane);
    scores(dp, key_lane + B::kV, q_lane + kQueries * kRowBytes);

    // P and dS in their places. Only tiles at the edge of some query's keys are masked; coef0 goes to the
    // first one.
    const int k0 = first_key(),
              last_first = __float_as_int(statistics[2 * kQueries + min(kQueries, queries - q0) - 1]);
    const bool edge = k0 + kKeys - 1 > a.visible.own.of(q0) || k0 <= last_first;
    const int column = part * kOwnQueries + 2 * (lane & 3), key = k0 + key_row + (lane >> 2);
    if (edge) {
#pragma unroll
      for (int n = 0; n < kOwnQueries / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int first = __float_as_int(statistics[2 * kQueries + column + 8 * n + e]),
                    last = a.visible.own.of(min(q0 + column + 8 * n + e, queries - 1));
          if (key < first || key > last) s[n][e] = -INFINITY;
          if (key + 8 < first || key + 8 > last) s[n][2 + e] = -INFINITY;
        }
    }
#pragma unroll
    for (int n = 0; n < kOwnQueries / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float lse = statistics[column + 8 * n + e], delta = statistics[kQueries + column + 8 * n + e];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          s[n][2 * i + e] = ex2(s[n][2 * i + e] * scale - lse);
          dp[n][2 * i + e] = s[n][2 * i + e] * (dp[n][2 * i + e] - delta);
        }
      }
    if (edge && a.coef0) {
#pragma unroll
      for (int n = 0; n < kOwnQueries / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int first = __float_as_int(statistics[2 * kQueries + column + 8 * n + e]);
          const float coef0 = statistics[3 * kQueries + column + 8 * n + e];
          if (key == first) dp[n][e] += coef0;
          if (key + 8 == first) dp[n][2 + e] += coef0;
        }
    }

    const auto gradients = [&](float(&out)[B::kOwnDepth / 8][4], const uint32_t(&left)[4], uint32_t right,
                               int j) {
#pragma unroll
      for (int n = 0; n < B::kOwnDepth / 16; ++n) {
        uint32_t g[4];
        ldmatrix_x4_trans(g, (right ^ (n << 5)) + j * 16 * kRowBytes);
        mma_16816(out[2 * n], left, g[0], g[1]);
        mma_16816(out[2 * n + 1], left, g[2], g[3]);
      }
    };
    store_accumulators<kQueries>(smem + B::kDs, key_row, part * kOwnQueries / 8, dp, 1.0f, 1.0f);
    if constexpr (B::kSplit == 1) {
#pragma unroll
      for (int j = 0; j < kQueries / 16; ++j) {
        uint32_t left[4];
        accumulators_to_a(left, s[2 * j], s[2 * j + 1]);
        gradients(dv, left, d_o_tile + by_rows, j);
      }
#pragma unroll
      for (int j = 0; j < kQueries / 16; ++j) {
        uint32_t left[4];
        accumulators_to_a(left, dp[2 * j], dp[2 * j + 1]);
        gradients(dk, left, q_tile + by_rows, j);
      }
    } else {
      store_accumulators<kQueries>(smem + B::kP, key_row, part * kOwnQueries / 8, s, 1.0f, 1.0f);
    }
    turn = key_tile() - __float_as_int(statistics[2 * kQueries]) /
                            kKeys;  // the statistics are the next step's from here on
    if (dq.turn && tid == 0) {
      const int* const made = dq.turn + static_cast<int64_t>(head) * dq.tiles + tile;
      spin_until([&] { return load_acquire(made) == turn; });
    }
    __syncthreads();  // dS (and P) are complete; without a split Q and dO are no longer read
    if (B::kStages == 1 && B::kSplit == 1 && step + 1 < steps) load_step(step + 1);
    if constexpr (B::kSplit > 1) {
      const uint32_t along =
          part * B::kOwnDepth * 2;  // this warp's channels; within a row the swizzle is an exclusive or
      const uint32_t scores_lane =
          base + key_row * kScoreBytes + swizzled<kQueries>(fragment_row(lane), fragment_chunk(lane));
#pragma unroll
      for (int j = 0; j < kQueries / 16; ++j) {
        uint32_t left[4];
        ldmatrix_x4(left, (scores_lane + B::kP) ^ (j << 5));
        gradients(dv, left, (d_o_tile + by_rows) ^ along, j);
        ldmatrix_x4(left, (scores_lane + B::kDs) ^ (j << 5));
        gradients(dk, left, (q_tile + by_rows) ^ along, j);
      }
    }

    // dQ: 16 queries and kDqDepth channels per warp.
    float sum[B::kDqDepth / 8][4] = {};
    const int query_warp = warp % B::kQueryWarps, depth_warp = warp / B::kQueryWarps;
    const uint32_t ds_lane =
        base + B::kDs +
        (swizzled<kQueries>(fragment_row_t(lane), fragment_chunk_t(lane)) ^ (query_warp << 5));
    const uint32_t k_lane = base + (by_rows ^ (depth_warp * B::kDqDepth * 2));
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      uint32_t left[4];
      ldmatrix_x4_trans(left, ds_lane + j * 16 * kScoreBytes);
#pragma unroll
      for (int n = 0; n < B::kDqDepth / 16; ++n) {
        uint32_t g[4];
        ldmatrix_x4_trans(g, (k_lane ^ (n << 5)) + j * 16 * kRowBytes);
        mma_16816(sum[2 * n], left, g[0], g[1]);
        mma_16816(sum[2 * n + 1], left, g[2], g[3]);
      }
    }
    const bool store = dq.turn && turn == 0;
#pragma unroll
    for (int i = 0; i < B::kDqDepth / 2; ++i) {
      float* const out = dq_element<B>(dq, head, tile, i);
      if (store)
        *out = sum[i / 4][i % 4];
      else
        atomicAdd(out, sum[i / 4][i % 4]);
    }
    if (B::kStages == 1 && B::kSplit > 1 && step + 1 < steps) {
      __syncthreads();  // Q and dO are no longer read
      load_step(step + 1);
    }
  }

  cp_async_wait<0>();
  __syncthreads();  // dQ's last tile is added; K is no longer read
  if (dq.turn && tid == 0 && steps > 0)
    store_release(dq.turn + static_cast<int64_t>(head_of(steps - 1)) * dq.tiles + tile_of(steps - 1),
                  turn + 1);
  store_accumulators<kDepth>(smem, key_row, part * B::kOwnDepth / 8, dk, a.scale, a.scale);
  store_accumulators<kDepth>(smem + B::kV, key_row, part * B::kOwnDepth / 8, dv, 1.0f, 1.0f);
  __syncthreads();
  const int k0 = first_key();
  for (int i = tid; i < kKeys * (kDepth / 8); i += B::kThreads) {
    const int row = i / (kDepth / 8), chunk = i % (kDepth / 8);
    if (k0 + row >= keys) break;
    const int64_t key = k0 + row, at = kv_head() * kDepth + chunk * 8;
    const unsigned char* const from = smem + swizzled<kDepth>(row, chunk);
    store_vec<8>(a.dk + key * a.kv_heads * kDepth + at, *reinterpret_cast<const Vec16<nv_bf16>*>(from));
    store_vec<8>(a.dv + key * a.dv_row + at, *reinterpret_cast<const Vec16<nv_bf16>*>(from + B::kV));
  }
}

/// dq = scale times the sums, as bf16 rows. Grid (heads, query tiles), the threads of the kernel above. Bound
/// by memory.
template <class B>
__global__ void __launch_bounds__(B::kThreads) attention_mma_dq_kernel(AttentionBackward a, DqSum dq) {
  constexpr int kDepth = B::kDepth;
  DYN_SMEM(unsigned char, smem, 1024);
  const int tid = static_cast<int>(threadIdx.x), warp = tid >> 5;
  const int head = static_cast<int>(blockIdx.x), tile = static_cast<int>(blockIdx.y);
  float sum[B::kDqDepth / 8][4];
#pragma unroll
  for (int i = 0; i < B::kDqDepth / 2; ++i) sum[i / 4][i % 4] = *dq_element<B>(dq, head, tile, i);
  store_accumulators<kDepth>(smem, warp % B::kQueryWarps * 16, warp / B::kQueryWarps * (B::kDqDepth / 8), sum,
                             a.scale, a.scale);
  __syncthreads();
  for (int i = tid; i < B::kQueries * (kDepth / 8); i += B::kThreads) {
    const int row = i / (kDepth / 8), chunk = i % (kDepth / 8);
    const int64_t query = static_cast<int64_t>(tile) * B::kQueries + row;
    if (query >= a.queries) break;
    store_vec<8>(a.dq + (query * a.heads + head) * kDepth + chunk * 8,
                 *reinterpret_cast<const Vec16<nv_bf16>*>(smem + swizzled<kDepth>(row, chunk)));
  }
}

/// n zeros of four bytes, 16 bytes per thread.
__global__ void __launch_bounds__(256) attention_zero_kernel(float4* p, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i < n) p[i] = float4{0, 0, 0, 0};
}

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class B>
void launch_backward(Context& ctx, const AttentionBackward& a) {
  const int64_t tiles = (a.queries + B::kQueries - 1) / B::kQueries;
  // Behind the turns is the counter.
  const int64_t turns = round_up(a.heads * tiles + 1, 4), sums = a.heads * tiles * B::kQueries * B::kDepth;
  ScratchScope temporaries(ctx.scratch);
  const Tensor turn = temporaries.alloc("attention.dq_turn", DType::i32, {turns});
  const Tensor sum = temporaries.alloc("attention.dq_sum", DType::f32, {sums});
  if (ctx.dry_run) return;
  int* const numbers = device_data<int>(turn);
  const DqSum dq = {device_data<float>(sum), ctx.deterministic ? numbers : nullptr, numbers + a.heads * tiles,
                    static_cast<int>(tiles)};
  void* const zeros = ctx.deterministic ? turn.data : sum.data;
  const int64_t count = (ctx.deterministic ? turns : sums) / 4;
  launch(ctx, "attention_zero", {dim3(blocks_for(count, 256)), dim3(256)}, attention_zero_kernel,
         static_cast<float4*>(zeros), count);
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(a.kv_heads) * blocks_for(a.keys, B::kKeys));
  config.block = dim3(B::kThreads);
  config.smem = B::kSmem;
  launch(ctx, "attention_mma_backward", config, attention_mma_backward_kernel<B>, a, dq);
  config.grid = dim3(static_cast<unsigned>(a.heads), static_cast<unsigned>(tiles));
  config.smem = B::kQueries * B::kRowBytes;
  launch(ctx, "attention_mma_dq", config, attention_mma_dq_kernel<B>, a, dq);
}

}  // namespace

void attention_mma_backward(Context& ctx, const AttentionBackward& a) {
  // depth, keys and queries of a tile, warps that share 16 keys, stages. Cards with 99 KB of shared memory
  // per block (8.6, 8.9, 12.x) take smaller tiles of the same number of queries, hence of the same scratch.
  const int capability = ctx.dry_run ? 80 : compute_capability(ctx);
  const bool large = capability == 80 || capability == 87 || (capability >= 90 && capability < 120);
  if (a.head_dim == 64)
    launch_backward<Backward<64, 128, 64, 1, 2>>(ctx, a);
  else if (a.head_dim == 128 && large)
    launch_backward<Backward<128, 128, 64, 1, 2>>(ctx, a);
  else if (a.head_dim == 128)
    launch_backward<Backward<128, 64, 64, 1, 1>>(ctx, a);
  else if (large)
    launch_backward<Backward<256, 64, 32, 2, 2>>(ctx, a);
  else
    launch_backward<Backward<256, 32, 32, 2, 1>>(ctx, a);
}

}  // namespace sluice::cuda
