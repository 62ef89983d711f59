// Attention backward for Hopper (after FlashAttention-3, Shah et al. 2024): TMA, mbarrier rings, wgmma.
//
// Mapping: an item is a tile of 128 keys of one key head; it stays while the 64-query tiles that see it pass
// by, last first, for every query head of its group in turn, so that dk and dv are summed in registers in a
// fixed order. Each of two consumer warpgroups owns 64 keys. With S^T = k q^T and dP^T = v dO^T transposed,
// P^T and dS^T are operands of dv += P^T dO and dk += dS^T q where they are, in registers; dS also goes
// through shared memory, for dq^T = k^T dS^T over all 128 keys, of which each consumer computes one half. dq
// leaves through shared memory and bulk additions to an f32 accumulator in the order of the registers; a
// second kernel (hopper_dq.cu) goes on from there. Deterministic: each tile of dq counts its additions, and
// key tiles wait for their turn. Key tiles of the same head are at about the same query at any time, so waits
// are short, and their reads are shared in the L2 cache. Blocks take items from a counter, longest first as
// far as no item waits for a later one. Producer warpgroup: warp 0 loads, warp 1 loads the per-query
// statistics, warp 2 adds dq. Overlap: dP^T with the exponentials, dv with the gradient of the scores, dk
// with dq's way through shared memory. Limits: tensor cores (five products), registers. Not yet run on a GPU.
#include "attention/hopper_common.cuh"
#include "attention/hopper_dq.h"
#include "attention/hopper_order.cuh"
#include "common/tensor_map.h"
#include "common/wgmma.cuh"

namespace sluice::cuda {
namespace {

constexpr int kQueries = kDqTile, kKeys = 128, kStages = 2, kThreads = 384;
// Three warpgroups start with 168 registers per thread, which can only be redistributed. At head_dim 128 the
// consumers need more than 232 (or ptxas serialises the products, C7512), which leaves the producer 24.
template <int kDim>
constexpr int kProducerRegisters = kDim == 64 ? 40 : 24;
template <int kDim>
constexpr int kConsumerRegisters = kDim == 64 ? 232 : 240;
constexpr int kConsumerWarps = 8;
constexpr int kQueryChunk = kQueries * 128, kKeyChunk = kKeys * 128;  // bytes of 64 columns

struct QueryNumbers {
  float lse[kQueries];  // base 2
  float delta[kQueries], coef0[kQueries];
  int first[kQueries];
};

struct Item : KeyTile {  // n = -1: no more
  int kv_head;
};

struct BackwardBarriers {
  uint64_t item_full, item_empty, kv_full, kv_empty, dq_full, dq_empty;
  uint64_t q_full[kStages], do_full[kStages], numbers_full[kStages], empty[kStages];
  Item item;
};

template <int kDim>
struct BackwardSmem {
  static constexpr int kChunks = kDim / 64;
  static constexpr int kKeyBytes = kChunks * kKeyChunk, kQueryBytes = kChunks * kQueryChunk;
  static constexpr int kScoreBytes = kKeys / 64 * kQueryChunk;  // dS: 64-key chunks of 64 queries
  static constexpr int kDqBytes = kQueries * kDim * 4;
  static constexpr int kK = 0, kV = kK + kKeyBytes, kQ = kV + kKeyBytes, kDo = kQ + kStages * kQueryBytes,
                       kScores = kDo + kStages * kQueryBytes, kDq = kScores + 2 * kScoreBytes,
                       kNumbers = kDq + kDqBytes,
                       kBarriers = kNumbers + kStages * static_cast<int>(sizeof(QueryNumbers)),
                       kBytes = kBarriers + static_cast<int>(sizeof(BackwardBarriers));
};

struct BackwardParams {
  const float *lse, *delta, *coef0;
  VisibleKeys visible;
  float* dq;     // (H, query tiles, kQueries kDim), in the order of registers
  int* turns;    // (H, query tiles): number of key tiles that have added to this tile of dq; null: any order
  int* counter;  // next item
  KeyTile* order;  // (key tiles): in which they are taken
  int queries, heads, kv_heads, group;
  int key_tiles, query_tiles, section;  // section: key heads served together
  float scale, scale_log2;
};

/// f(query head, query tile) for every step of an item, in the order common to all roles.
template <class F>
DEVICE_INLINE void for_each_step(const BackwardParams& p, const Item& item, F&& f) {
  int h = item.kv_head * p.group, m = item.m_last;
  for (int left = p.group * (item.m_last - item.m_first + 1); left > 0; --left) {
    f(h, m);
    if (--m < item.m_first) m = item.m_last, ++h;
  }
}

/// Reads the item published by the loader. kWarpArrives: all lanes call it.
DEVICE_INLINE Item next_item(BackwardBarriers* bar, unsigned phase) {
  mbarrier_wait(&bar->item_full, phase);
  const Item item = bar->item;
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&bar->item_empty);
  return item;
}

// -------------------------------------------------------------------------------------------------
// producer's warps

template <int kDim>
DEVICE_INLINE void load_tiles(const BackwardParams& p, unsigned char* smem, BackwardBarriers* bar,
                              const TensorMap* map_q, const TensorMap* map_k, const TensorMap* map_v,
                              const TensorMap* map_do) {
  using Smem = BackwardSmem<kDim>;
  const int total = p.key_tiles * p.kv_heads;
  Ring<kStages> ring;
  unsigned phase = 1;
  // Every item comes from the counter, none from the block index: an item may wait for lower ones, which have
  // then been started.
  for (;; phase ^= 1) {
    const int index = atomicAdd(p.counter, 1);
    if (index >= total) break;
    const int per_section = p.section * p.key_tiles, base = index / per_section * p.section;
    const int kv_heads = min(p.section, p.kv_heads - base), rest = index % per_section;
    Item item;
    static_cast<KeyTile&>(item) = p.order[rest / kv_heads];
    item.kv_head = base + rest % kv_heads;
    mbarrier_wait(&bar->item_empty, phase);
    bar->item = item;
    mbarrier_arrive(&bar->item_full);

    mbarrier_wait(&bar->kv_empty, phase);
    mbarrier_arrive_expect_tx(&bar->kv_full, 2 * Smem::kKeyBytes);
    for (int c = 0; c < Smem::kChunks; ++c) {
      tma_load_3d(smem + Smem::kK + c * kKeyChunk, map_k, &bar->kv_full, c * 64, item.kv_head,
                  item.n * kKeys);
      tma_load_3d(smem + Smem::kV + c * kKeyChunk, map_v, &bar->kv_full, c * 64, item.kv_head,
                  item.n * kKeys);
    }
    for_each_step(p, item, [&](int h, int m) {
      const int s = ring.stage;
      mbarrier_wait(bar->empty + s, ring.phase ^ 1);
      mbarrier_arrive_expect_tx(bar->q_full + s, Smem::kQueryBytes);
#pragma unroll 1
      for (int c = 0; c < Smem::kChunks; ++c)
        tma_load_3d(smem + Smem::kQ + s * Smem::kQueryBytes + c * kQueryChunk, map_q, bar->q_full + s, c * 64,
                    h, m * kQueries);
      mbarrier_arrive_expect_tx(bar->do_full + s, Smem::kQueryBytes);
#pragma unroll 1
      for (int c = 0; c < Smem::kChunks; ++c)
        tma_load_3d(smem + Smem::kDo + s * Smem::kQueryBytes + c * kQueryChunk, map_do, bar->do_full + s,
                    c * 64, h, m * kQueries);
      ring.advance();
    });
  }
  mbarrier_wait(&bar->item_empty, phase);
  bar->item.n = -1;
  mbarrier_arrive(&bar->item_full);
}

/// Queries beyond the last have weight 0: their lse is infinite.
DEVICE_INLINE void load_numbers(const BackwardParams& p, QueryNumbers* numbers, BackwardBarriers* bar) {
  const int lane = threadIdx.x % 32;
  Ring<kStages> ring;
  for (unsigned phase = 0;; phase ^= 1) {
    const Item item = next_item(bar, phase);
    if (item.n < 0) break;
    for_each_step(p, item, [&](int h, int m) {
      mbarrier_wait(bar->empty + ring.stage, ring.phase ^ 1);
      QueryNumbers& to = numbers[ring.stage];
#pragma unroll 1
      for (int i = lane; i < kQueries; i += 32) {
        const int row = m * kQueries + i, at = h * p.queries + row;
        const bool inside = row < p.queries;
        to.lse[i] = inside ? p.lse[at] * kLog2e : INFINITY;
        to.delta[i] = inside ? p.delta[at] : 0.0f;
        to.coef0[i] = inside && p.coef0 ? p.coef0[at] : 0.0f;
        to.first[i] = p.visible.first[min(row, p.queries - 1)];
      }
      mbarrier_arrive(bar->numbers_full + ring.stage);
      ring.advance();
    });
  }
}

template <int kDim>
DEVICE_INLINE void add_dq(const BackwardParams& p, const unsigned char* s_dq, BackwardBarriers* bar) {
  constexpr int kElements = kQueries * kDim;
  const bool elected = threadIdx.x % 32 == 0;
  unsigned full = 0;
  for (unsigned phase = 0;; phase ^= 1) {
    const Item item = next_item(bar, phase);
    if (item.n < 0) break;
    if (!elected) continue;
    for_each_step(p, item, [&](int h, int m) {
      const int tile = h * p.query_tiles + m;
      float* dst = p.dq + static_cast<int64_t>(tile) * kElements;
      const int turn = p.turns ? item.n - p.visible.first[m * kQueries] / kKeys : 0;
      mbarrier_wait(&bar->dq_full, full);
      full ^= 1;
      if (p.turns && turn > 0) {
        spin_until([&] { return load_acquire(p.turns + tile) == turn; });
        fence_proxy_async_global();
      }
      if (p.turns && turn == 0)
        bulk_store(dst, s_dq, BackwardSmem<kDim>::kDqBytes);
      else
        bulk_reduce_add(dst, s_dq, BackwardSmem<kDim>::kDqBytes);
      tma_store_commit();
      tma_store_wait_read<0>();
      mbarrier_arrive(&bar->dq_empty);
      if (p.turns) {
        tma_store_wait<0>();
        fence_proxy_async_global();
        store_release(p.turns + tile, turn + 1);
      }
    });
  }
}

// -------------------------------------------------------------------------------------------------------
// consumers

DEVICE_INLINE void sync_consumers() { named_barrier_sync<1>(256); }
DEVICE_INLINE void sync_consumer(int consumer) {
  if (consumer == 0)
    named_barrier_sync<2>(128);
  else
    named_barrier_sync<3>(128);
}

DEVICE_INLINE void pack_columns(uint32_t (&p)[4], const float* x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) p[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
}

/// A thread's part of S^T and dP^T: rows are keys key and key + 8, columns the queries 8 b + column + e of
/// tile m.
struct Place {
  int low;  // first of the warp's 16 keys
  int key;
  int column;  // 2 t
};

/// s becomes P^T.
DEVICE_INLINE void weights(float (&s)[kQueries / 2], const BackwardParams& p, const QueryNumbers& numbers,
                           const Place& at, int m) {
#pragma unroll
  for (int b = 0; b < kQueries / 8; ++b) {
    const float2 lse = *reinterpret_cast<const float2*>(numbers.lse + b * 8 + at.column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s[b * 4 + 2 * i] = ex2(s[b * 4 + 2 * i] * p.scale_log2 - lse.x);
      s[b * 4 + 2 * i + 1] = ex2(s[b * 4 + 2 * i + 1] * p.scale_log2 - lse.y);
    }
  }
  if (at.low + 15 <= p.visible.own.of(m * kQueries) && at.low > numbers.first[kQueries - 1]) return;
#pragma unroll
  for (int b = 0; b < kQueries / 8; ++b)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = b * 8 + at.column + e, first = numbers.first[column],
                last = p.visible.own.of(min(m * kQueries + column, p.queries - 1));
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (at.key + 8 * i < first || at.key + 8 * i > last) s[b * 4 + 2 * i + e] = 0;
    }
}

/// s (P^T) becomes dS^T.
DEVICE_INLINE void score_gradients(float (&s)[kQueries / 2], const float (&dp)[kQueries / 2],
                                   const QueryNumbers& numbers, const Place& at, bool has_coef0) {
#pragma unroll
  for (int b = 0; b < kQueries / 8; ++b) {
    const float2 delta = *reinterpret_cast<const float2*>(numbers.delta + b * 8 + at.column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s[b * 4 + 2 * i] *= dp[b * 4 + 2 * i] - delta.x;
      s[b * 4 + 2 * i + 1] *= dp[b * 4 + 2 * i + 1] - delta.y;
    }
  }
  if (!has_coef0 || at.low > numbers.first[kQueries - 1] || at.low + 15 < numbers.first[0]) return;
#pragma unroll
  for (int b = 0; b < kQueries / 8; ++b)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = b * 8 + at.column + e;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (at.key + 8 * i == numbers.first[column]) s[b * 4 + 2 * i + e] += numbers.coef0[column];
    }
}

template <int kDim>
DEVICE_INLINE void consume(const BackwardParams& p, unsigned char* smem, BackwardBarriers* bar,
                           const TensorMap* map_dk, const TensorMap* map_dv, int consumer) {
  using Smem = BackwardSmem<kDim>;
  // dq^T: 64 of the columns of k by kDqQueries of the queries
  constexpr int kDqQueries = kDim == 64 ? 32 : 64;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128;
  const auto* numbers = reinterpret_cast<const QueryNumbers*>(smem + Smem::kNumbers);
  const uint32_t base = smem_addr(smem);
  const uint32_t own_k = base + Smem::kK + consumer * 8192, own_v = base + Smem::kV + consumer * 8192;
  const uint32_t dq_k = base + Smem::kK + (kDim == 64 ? 0 : consumer * kKeyChunk);
  const uint32_t dq_scores = base + Smem::kScores + (kDim == 64 ? consumer * kDqQueries * 128 : 0);
  const uint32_t own_scores = base + Smem::kScores + consumer * kQueryChunk;
  float4* s_dq = reinterpret_cast<float4*>(smem + Smem::kDq + consumer * (Smem::kDqBytes / 2));
  const auto release = [&](uint64_t* barrier) {
    if (lane == 0) mbarrier_arrive(barrier);
  };

  float s[kQueries / 2], dp[kQueries / 2], dq[kDqQueries / 2], dk[kDim / 2], dv[kDim / 2];
  uint32_t pt[kQueries / 16][4], dst[kQueries / 16][4];
  // own keys (K-major) times the 64 queries of a tile (K-major)
  const auto issue_scores = [&](float(&d)[kQueries / 2], uint32_t keys, uint32_t queries) {
    const uint64_t a = smem_descriptor(keys), b = smem_descriptor(queries);
#pragma unroll
    for (int kk = 0; kk < kDim / 16; ++kk) {
      const uint32_t column = (kk % 4) * 32;
      wgmma_ss<Major::k, Major::k>(d, further(a, (kk / 4) * kKeyChunk + column),
                                   further(b, (kk / 4) * kQueryChunk + column), kk > 0);
    }
    wgmma_commit();
  };
  // own keys by queries, in registers, times queries by columns
  const auto issue_gradient = [&](float(&d)[kDim / 2], const uint32_t(&a)[kQueries / 16][4],
                                  uint32_t queries) {
    const uint64_t b = smem_descriptor(queries, kQueryChunk);
#pragma unroll
    for (int kk = 0; kk < kQueries / 16; ++kk) wgmma_rs<Major::mn>(d, a[kk], further(b, kk * 2048), true);
    wgmma_commit();
  };

  unsigned count = 0;  // steps so far, which determine the stages of the ring, of dS and of dq
  for (unsigned phase = 0;; phase ^= 1) {
    Item item = next_item(bar, phase);
    if (uniform(item.n) < 0) break;
    Place at;
    at.low = item.n * kKeys + consumer * 64 + warp * 16;
    at.key = at.low + lane / 4;
    at.column = lane % 4 * 2;

    mbarrier_wait(&bar->kv_full, phase);
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0;
    int m = item.m_last;
    for (int left = uniform((item.m_last - item.m_first + 1) * p.group); left > 0; --left, ++count) {
      const int stage = static_cast<int>(count % kStages);
      const unsigned ring_phase = count / kStages % 2;
      const uint32_t scores = count % 2 * Smem::kScoreBytes;
      const uint32_t q = base + Smem::kQ + stage * Smem::kQueryBytes,
                     d_o = base + Smem::kDo + stage * Smem::kQueryBytes;
      mbarrier_wait(bar->q_full + stage, ring_phase);
      wgmma_fence();
      issue_scores(s, own_k, q);
      mbarrier_wait(bar->do_full + stage, ring_phase);
      wgmma_fence();
      issue_scores(dp, own_v, d_o);
      mbarrier_wait(bar->numbers_full + stage, ring_phase);
      wgmma_wait<1>();
      hold_registers(s);
      weights(s, p, numbers[stage], at, m);
#pragma unroll
      for (int kk = 0; kk < kQueries / 16; ++kk) pack_columns(pt[kk], s + kk * 8);
      wgmma_wait<0>();
      hold_registers(dp);
      hold_registers(pt);
      hold_registers(dv);
      wgmma_fence();
      issue_gradient(dv, pt, d_o);
      score_gradients(s, dp, numbers[stage], at, p.coef0 != nullptr);
#pragma unroll
      for (int kk = 0; kk < kQueries / 16; ++kk) {
        pack_columns(dst[kk], s + kk * 8);
        // transposed: a row of 8 keys for each of 16 queries
        const int query = kk * 16 + lane / 16 * 8 + lane % 8;
        stmatrix_x4_trans(own_scores + scores + swizzled(query, warp * 2 + lane / 8 % 2), dst[kk]);
      }
      fence_proxy_async();
      sync_consumers();  // dS of both; and both have done with the other buffer, having waited for dq
      hold_registers(dst);
      hold_registers(dk);
      wgmma_fence();
      // dq before dk: it leaves while dk is computed.
      const uint64_t k_columns = smem_descriptor(dq_k), ds = smem_descriptor(dq_scores + scores);
#pragma unroll
      for (int kk = 0; kk < kKeys / 16; ++kk)
        wgmma_ss<Major::mn, Major::k>(dq, further(k_columns, kk * 2048),
                                      further(ds, (kk / 4) * kQueryChunk + (kk % 4) * 32), kk > 0);
      wgmma_commit();
      issue_gradient(dk, dst, q);
      wgmma_wait<1>();
      hold_registers(dq);
      hold_registers(pt);
      mbarrier_wait(&bar->dq_empty, ~count & 1);
#pragma unroll
      for (int i = 0; i < kDqQueries / 8; ++i)
        s_dq[i * 128 + thread] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
      fence_proxy_async();
      __syncwarp();
      release(&bar->dq_full);
      wgmma_wait<0>();
      hold_registers(dst);
      release(bar->empty + stage);
      m = m == item.m_first ? item.m_last : m - 1;
    }
    hold_registers(dk);
    hold_registers(dv);
    // dv is written through the buffer of this consumer's values, dk through that of its keys once they are
    // no longer read.
    sync_consumers();
#pragma unroll
    for (int c = 0; c < kDim / 16; ++c) {  // 16 columns
      const uint32_t to = (c / 4) * kKeyChunk + swizzled(warp * 16 + lane % 16, c % 4 * 2 + lane / 16);
      uint32_t out[4];
      pack_columns(out, dv + c * 8);
      stmatrix_x4(own_v + to, out);
#pragma unroll
      for (int i = 0; i < 8; ++i) dk[c * 8 + i] *= p.scale;
      pack_columns(out, dk + c * 8);
      stmatrix_x4(own_k + to, out);
    }
    fence_proxy_async();
    sync_consumer(consumer);
    if (thread == 0) {
      const int key = item.n * kKeys + consumer * 64;
      for (int c = 0; c < Smem::kChunks; ++c) {
        const int from = consumer * 8192 + c * kKeyChunk;
        tma_store_3d(map_dk, smem + Smem::kK + from, c * 64, item.kv_head, key);
        tma_store_3d(map_dv, smem + Smem::kV + from, c * 64, item.kv_head, key);
      }
      tma_store_commit();
      tma_store_wait_read<0>();
      mbarrier_arrive(&bar->kv_empty);
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    attention_backward_kernel(const BackwardParams p, const __grid_constant__ TensorMap map_q,
                              const __grid_constant__ TensorMap map_k,
                              const __grid_constant__ TensorMap map_v,
                              const __grid_constant__ TensorMap map_do,
                              const __grid_constant__ TensorMap map_dk,
                              const __grid_constant__ TensorMap map_dv) {
  using Smem = BackwardSmem<kDim>;
  DYN_SMEM(unsigned char, smem, 1024);
  auto* bar = reinterpret_cast<BackwardBarriers*>(smem + Smem::kBarriers);
  if (threadIdx.x == 0) {
    mbarrier_init(&bar->item_full, 1);
    mbarrier_init(&bar->item_empty, kConsumerWarps + 2);
    mbarrier_init(&bar->kv_full, 1);
    mbarrier_init(&bar->kv_empty, 2);
    mbarrier_init(&bar->dq_full, kConsumerWarps);
    mbarrier_init(&bar->dq_empty, 1);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(bar->q_full + s, 1);
      mbarrier_init(bar->do_full + s, 1);
      mbarrier_init(bar->numbers_full + s, 32);
      mbarrier_init(bar->empty + s, kConsumerWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int group = uniform(static_cast<int>(threadIdx.x) / 128);
  if (group == 0) {
    static_assert(kProducerRegisters<kDim> + 2 * kConsumerRegisters<kDim> <= 3 * kRegistersAtEntry);
    setmaxnreg_dec<kProducerRegisters<kDim>>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x == 0)
      load_tiles<kDim>(p, smem, bar, &map_q, &map_k, &map_v, &map_do);
    else if (warp == 1)
      load_numbers(p, reinterpret_cast<QueryNumbers*>(smem + Smem::kNumbers), bar);
    else if (warp == 2)
      add_dq<kDim>(p, smem + Smem::kDq, bar);
  } else {
    setmaxnreg_inc<kConsumerRegisters<kDim>>();
    consume<kDim>(p, smem, bar, &map_dk, &map_dv, group - 1);
  }
}

template <int kDim>
void launch_backward(Context& ctx, const AttentionBackward& a, float* dq, int* turns, KeyTile* order) {
  BackwardParams p = {};
  p.lse = a.lse, p.delta = a.delta, p.coef0 = a.coef0;
  p.visible = a.visible;
  p.queries = static_cast<int>(a.queries);
  p.heads = a.heads, p.kv_heads = a.kv_heads, p.group = a.heads / a.kv_heads;
  p.key_tiles = static_cast<int>(blocks_for(a.keys, kKeys));
  p.query_tiles = static_cast<int>(blocks_for(a.queries, kQueries));
  p.dq = dq;
  const int64_t tiles = static_cast<int64_t>(a.heads) * p.query_tiles;
  p.counter = turns + tiles, p.order = order;
  p.turns = ctx.deterministic ? turns : nullptr;
  p.scale = a.scale, p.scale_log2 = a.scale * kLog2e;
  // Data that every item reads repeatedly: q, dO and the accumulator of dq, of one query head at a time.
  p.section = heads_per_section(a.queries * kDim * 8, a.kv_heads);
  const cudaStream_t s = stream(ctx);
  check(cudaMemsetAsync(turns, 0, (tiles + 1) * sizeof(int), s), "cudaMemsetAsync", "attention.turns");
  if (!p.turns)
    check(cudaMemsetAsync(dq, 0, tiles * kQueries * kDim * sizeof(float), s), "cudaMemsetAsync",
          "attention.dq");
  launch(ctx, "attention_hopper_order",
         {.grid = dim3(1),
          .block = dim3(kOrderThreads),
          .smem = 2 * sizeof(int) * static_cast<size_t>(p.key_tiles)},
         order_key_tiles_kernel<kQueries, kKeys>, order, a.visible, p.key_tiles, p.query_tiles);
  const auto queries = [&](const char* what, const nv_bf16* x) {
    return make_tensor_map_3d(what, x, a.queries, a.heads, kDim, kQueries, 1, 64);
  };
  const auto keys = [&](const char* what, const nv_bf16* x, int rows, int64_t row = 0) {
    return make_tensor_map_3d(what, x, a.keys, a.kv_heads, kDim, rows, 1, 64, MapElement::bf16, row);
  };
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(std::min(p.key_tiles * a.kv_heads, num_multiprocessors(ctx))));
  config.block = dim3(kThreads);
  config.smem = BackwardSmem<kDim>::kBytes;
  launch(ctx, "attention_hopper_backward", config, attention_backward_kernel<kDim>, p, queries("q", a.q),
         keys("k", a.k, kKeys), keys("v", a.v, kKeys), queries("d_o", a.d_o), keys("dk", a.dk, 64),
         keys("dv", a.dv, 64, a.dv_row));
}

}  // namespace

void attention_hopper_backward(Context& ctx, const AttentionBackward& a) {
  SLUICE_CHECK(attention_hopper_supports(a.head_dim), "attention_hopper_backward: head_dim {}", a.head_dim);
  ScratchScope t(ctx.scratch);
  const int64_t query_tiles = (a.queries + kQueries - 1) / kQueries;
  float* dq =
      device_data<float>(t.alloc("attention.dq", DType::f32, {a.heads, query_tiles * kQueries, a.head_dim}));
  int* turns = device_data<int>(t.alloc("attention.turns", DType::i32, {a.heads * query_tiles + 1}));
  const int64_t key_tiles = (a.keys + kKeys - 1) / kKeys;
  KeyTile* order = device_data<KeyTile>(t.alloc("attention.order", DType::i32, {key_tiles, 3}));
  if (!ctx.dry_run && a.queries > 0) {
    if (a.head_dim == 64)
      launch_backward<64>(ctx, a, dq, turns, order);
    else
      launch_backward<128>(ctx, a, dq, turns, order);
  }
  attention_hopper_dq(ctx, a, dq);
}

}  // namespace sluice::cuda
