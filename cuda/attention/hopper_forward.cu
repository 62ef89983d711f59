// Attention forward for Hopper (after FlashAttention-3, Shah et al. 2024): TMA, mbarrier rings, wgmma, one
// producer warp and two consumer warpgroups, persistent blocks.
//
// Mapping: a tile is 64 queries per consumer warpgroup of one head; its key tiles of 128 run from the
// diagonal down to the first visible key, so that causal masking comes first. A block takes tiles from a
// counter, longest first; heads are processed in sections whose keys and values fit into the L2 cache
// together. Overlap: the product q k of key tile j - 1 is issued together with p v of tile j, and the softmax
// of j - 1 runs under the latter; named barriers hand the tensor cores from one consumer to the next, so that
// one's exponentials run under another's products. Limits: tensor cores, then the exponentials (MUFU) at
// head_dim 64. The epilogue writes through shared memory and TMA; gate logits use the buffer of y. Not yet
// run on a GPU.
#include "attention/hopper_common.cuh"
#include "attention/kernels.h"
#include "common/math.cuh"
#include "common/tensor_map.h"
#include "common/wgmma.cuh"

namespace sluice::cuda {
namespace {

template <int kDim>
struct ForwardTile {
  static constexpr int kConsumers = 2;
  static constexpr int kQueries = 64 * kConsumers, kKeys = 128, kStages = 2;
  static constexpr int kChunks = kDim / 64;  // 64-column chunks of a row
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * kRegistersAtEntry);
  static constexpr int kGroupBytes = kChunks * 64 * 128;  // the 64 queries of a consumer
  static constexpr int kQueryBytes = kConsumers * kGroupBytes;
  static constexpr int kKeyChunk = kKeys * 128;
  static constexpr int kKeyBytes = kChunks * kKeyChunk;

  struct Barriers {
    uint64_t q_full, q_empty, z_full, z_empty;
    uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    int tile;  // which tile the queries belong to; -1: no more
  };
  static constexpr int kSmemBytes =
      3 * kQueryBytes + 2 * kStages * kKeyBytes + static_cast<int>(sizeof(Barriers));
};

struct ForwardParams {
  VisibleKeys visible;
  float *lse, *z0;
  const nv_bf16 *sink, *gate;  // gate: headwise logits
  bool fused, elementwise;
  GateKind kind;
  int queries, heads, group;         // group: query heads per key head
  int tiles, query_blocks, section;  // section: query heads served together
  int* counter;
  float scale_log2;
};

struct TileRange {
  int head, q0, n_first, n_last;  // key tiles n_first..n_last
};

template <int kQueries, int kKeys>
DEVICE_INLINE TileRange locate(const ForwardParams& p, int tile) {
  const int per_section = p.section * p.query_blocks;
  const int base = tile / per_section * p.section, rest = tile % per_section;
  const int heads = min(p.section, p.heads - base);
  TileRange r;
  r.head = base + rest % heads;
  r.q0 = (p.query_blocks - 1 - rest / heads) * kQueries;
  r.n_first = p.visible.first[r.q0] / kKeys;
  r.n_last = p.visible.own.of(min(r.q0 + kQueries, p.queries) - 1) / kKeys;
  return r;
}

/// Named barriers: 1, 2 pass the turn at the tensor cores; 3, 4 synchronise the threads of one consumer.
/// Immediate ids: a register would make the compiler reserve all sixteen.
DEVICE_INLINE void await_turn(int consumer) {
  if (consumer == 0)
    named_barrier_sync<1>(256);
  else
    named_barrier_sync<2>(256);
}
DEVICE_INLINE void pass_turn(int consumer) {
  if (consumer == 0)
    named_barrier_arrive<2>(256);
  else
    named_barrier_arrive<1>(256);
}
DEVICE_INLINE void sync_consumer(int consumer) {
  if (consumer == 0)
    named_barrier_sync<3>(128);
  else
    named_barrier_sync<4>(128);
}

DEVICE_INLINE float apply_gate(float x, float z, GateKind kind) {
  const float a = activate(kind.activation, z, sigmoid(z));
  return kind.combine == GateCombine::multiply ? x * a : x + a;
}

template <int kDim>
DEVICE_INLINE void produce(const ForwardParams& p, unsigned char* smem,
                           typename ForwardTile<kDim>::Barriers* bar, const TensorMap* map_q,
                           const TensorMap* map_k, const TensorMap* map_v, const TensorMap* map_z) {
  using Tile = ForwardTile<kDim>;
  unsigned char* s_q = smem;
  unsigned char* s_k = s_q + Tile::kQueryBytes;
  unsigned char* s_v = s_k + Tile::kStages * Tile::kKeyBytes;
  unsigned char* s_z = s_v + Tile::kStages * Tile::kKeyBytes + Tile::kQueryBytes;
  Ring<Tile::kStages> k_ring, v_ring;
  const auto load_keys = [&](const TensorMap* map, unsigned char* base, uint64_t* full, uint64_t* empty,
                             Ring<Tile::kStages>& ring, int head, int n) {
    const int s = ring.stage;
    mbarrier_wait(empty + s, ring.phase ^ 1);
    mbarrier_arrive_expect_tx(full + s, Tile::kKeyBytes);
    for (int c = 0; c < Tile::kChunks; ++c)
      tma_load_3d(base + s * Tile::kKeyBytes + c * Tile::kKeyChunk, map, full + s, c * 64, head,
                  n * Tile::kKeys);
    ring.advance();
  };
  const auto load_queries = [&](const TensorMap* map, unsigned char* base, uint64_t* full, int head, int q0) {
    mbarrier_arrive_expect_tx(full, Tile::kQueryBytes);
    for (int w = 0; w < Tile::kConsumers; ++w)
      for (int c = 0; c < Tile::kChunks; ++c)
        tma_load_3d(base + w * Tile::kGroupBytes + c * 8192, map, full, c * 64, head, q0 + w * 64);
  };

  unsigned phase = 1;
  for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles;) {
    const int next = static_cast<int>(gridDim.x) + atomicAdd(p.counter, 1);
    const TileRange r = locate<Tile::kQueries, Tile::kKeys>(p, tile);
    const int kv_head = r.head / p.group;
    load_keys(map_k, s_k, bar->k_full, bar->k_empty, k_ring, kv_head, r.n_last);
    mbarrier_wait(&bar->q_empty, phase);
    bar->tile = tile;
    load_queries(map_q, s_q, &bar->q_full, r.head, r.q0);
    for (int n = r.n_last - 1; n >= r.n_first; --n) {
      load_keys(map_k, s_k, bar->k_full, bar->k_empty, k_ring, kv_head, n);
      load_keys(map_v, s_v, bar->v_full, bar->v_empty, v_ring, kv_head, n + 1);
    }
    load_keys(map_v, s_v, bar->v_full, bar->v_empty, v_ring, kv_head, r.n_first);
    if (p.elementwise) {  // last: the buffer is free only after the previous tile has been written
      mbarrier_wait(&bar->z_empty, phase);
      load_queries(map_z, s_z, &bar->z_full, r.head, r.q0);
    }
    phase ^= 1;
    tile = next;
  }
  mbarrier_wait(&bar->q_empty, phase);
  bar->tile = -1;
  mbarrier_arrive(&bar->q_full);
}

/// The rows of one thread: row[i] and the state of its softmax.
struct Rows {
  int row[2], first[2], last[2];
  int warp_last, warp_first;  // the last key of the warp's first row; the first key of its last row
  float max[2], sum[2], z0[2];
};

/// Keys before the first or after the last become -inf; the logit of the first is kept.
template <int kKeys>
DEVICE_INLINE void mask(float (&s)[kKeys / 2], Rows& r, int n, int t4) {
  const int key0 = n * kKeys;
  if (key0 + kKeys - 1 <= r.warp_last && key0 > r.warp_first) return;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int b = 0; b < kKeys / 8; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[b * 4 + 2 * i + e];
        const int key = key0 + b * 8 + t4 * 2 + e;
        if (key == r.first[i]) r.z0[i] = x;
        if (key < r.first[i] || key > r.last[i]) x = -INFINITY;
      }
}

/// s becomes exp(s - max); `rescale` is the factor for earlier sums and outputs. A row without visible keys
/// so far keeps a maximum of -inf and weights of 0.
template <int kKeys>
DEVICE_INLINE void softmax(float (&s)[kKeys / 2], Rows& r, float (&rescale)[2], float scale_log2) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float m = r.max[i];
#pragma unroll
    for (int b = 0; b < kKeys / 8; ++b) m = fmaxf(m, fmaxf(s[b * 4 + 2 * i], s[b * 4 + 2 * i + 1]));
    m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 1));
    m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 2));
    const float base = softmax_base(m, scale_log2);
    rescale[i] = softmax_rescale(r.max[i], scale_log2, base);
    r.max[i] = m;
    float sum = 0;
#pragma unroll
    for (int b = 0; b < kKeys / 8; ++b)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[b * 4 + 2 * i + e];
        x = ex2(x * scale_log2 - base);
        sum += x;
      }
    r.sum[i] = r.sum[i] * rescale[i] + sum;
  }
}

/// 16 columns of accumulators, two rows per thread, as four registers for stmatrix or for wgmma's A.
DEVICE_INLINE void pack_columns(uint32_t (&p)[4], const float* x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) p[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
}

template <int kDim>
DEVICE_INLINE void consume(const ForwardParams& p, unsigned char* smem,
                           typename ForwardTile<kDim>::Barriers* bar, const TensorMap* map_o,
                           const TensorMap* map_y, int consumer) {
  using Tile = ForwardTile<kDim>;
  constexpr int kKeys = Tile::kKeys;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t4 = lane % 4;
  const bool leader = threadIdx.x % 128 == 0;
  const uint32_t s_q = smem_addr(smem) + consumer * Tile::kGroupBytes;
  const uint32_t s_k = smem_addr(smem) + Tile::kQueryBytes;
  const uint32_t s_v = s_k + Tile::kStages * Tile::kKeyBytes;
  unsigned char* stage_o =
      smem + Tile::kQueryBytes + 2 * Tile::kStages * Tile::kKeyBytes + consumer * Tile::kGroupBytes;
  unsigned char* stage_y = stage_o + Tile::kQueryBytes;

  Ring<Tile::kStages> k_ring, v_ring;
  bool stored = false;  // the leader's stores of the previous tile may still read shared memory
  const auto release = [&](uint64_t* empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };
  float o[kDim / 2], s[kKeys / 2];
  uint32_t pr[kKeys / 16][4];
  const auto issue_qk = [&] {
    const uint64_t q = smem_descriptor(s_q), k = smem_descriptor(s_k + k_ring.stage * Tile::kKeyBytes);
#pragma unroll
    for (int kk = 0; kk < kDim / 16; ++kk) {
      const uint32_t column = (kk % 4) * 32;
      wgmma_ss<Major::k, Major::k>(s, further(q, (kk / 4) * 8192 + column),
                                   further(k, (kk / 4) * Tile::kKeyChunk + column), kk > 0);
    }
    wgmma_commit();
  };
  const auto issue_pv = [&](bool accumulate) {
    const uint64_t v = smem_descriptor(s_v + v_ring.stage * Tile::kKeyBytes, Tile::kKeyChunk);
#pragma unroll
    for (int kk = 0; kk < kKeys / 16; ++kk)
      wgmma_rs<Major::mn>(o, pr[kk], further(v, kk * 2048), accumulate || kk > 0);
    wgmma_commit();
  };

  if (consumer == 1) pass_turn(consumer);  // the first turn
  for (unsigned phase = 0;; phase ^= 1) {
    mbarrier_wait(&bar->q_full, phase);
    const int tile = uniform(bar->tile);
    if (tile < 0) break;
    TileRange r = locate<Tile::kQueries, kKeys>(p, tile);
    r.n_first = uniform(r.n_first);
    Rows rows;
    const int warp_row = r.q0 + consumer * 64 + warp * 16, end = p.queries - 1;
    rows.warp_last = p.visible.own.of(min(warp_row, end));
    rows.warp_first = p.visible.first[min(warp_row + 15, end)];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.row[i] = warp_row + g + 8 * i;
      rows.first[i] = p.visible.first[min(rows.row[i], end)];
      rows.last[i] = p.visible.own.of(min(rows.row[i], end));
      rows.max[i] = rows.z0[i] = -INFINITY;
      rows.sum[i] = 0;
    }
    float rescale[2];

    mbarrier_wait(bar->k_full + k_ring.stage, k_ring.phase);
    wgmma_fence();
    issue_qk();
    if (stored) {  // during the first product: releases the buffer of the gate logits
      tma_store_wait_read<0>();
      if (p.elementwise) mbarrier_arrive(&bar->z_empty);
      stored = false;
    }
    wgmma_wait<0>();
    hold_registers(s);
    release(bar->k_empty + k_ring.stage);
    k_ring.advance();
    if (r.n_last == r.n_first) release(&bar->q_empty);
    mask<kKeys>(s, rows, r.n_last, t4);
    softmax<kKeys>(s, rows, rescale, p.scale_log2);
#pragma unroll
    for (int kk = 0; kk < kKeys / 16; ++kk) pack_columns(pr[kk], s + kk * 8);

    for (int n = r.n_last - 1; n >= r.n_first; --n) {
      mbarrier_wait(bar->k_full + k_ring.stage, k_ring.phase);
      await_turn(consumer);
      hold_registers(pr);
      hold_registers(o);
      wgmma_fence();
      issue_qk();
      mbarrier_wait(bar->v_full + v_ring.stage, v_ring.phase);
      wgmma_fence();
      issue_pv(n + 1 < r.n_last);
      pass_turn(consumer);
      wgmma_wait<1>();
      hold_registers(s);
      release(bar->k_empty + k_ring.stage);
      k_ring.advance();
      if (n == r.n_first) release(&bar->q_empty);
      mask<kKeys>(s, rows, n, t4);
      softmax<kKeys>(s, rows, rescale, p.scale_log2);
      finish_before_next_wait(rows.sum[0] + rows.sum[1]);
      wgmma_wait<0>();
      hold_registers(o);
      hold_registers(pr);
      release(bar->v_empty + v_ring.stage);
      v_ring.advance();
#pragma unroll
      for (int kk = 0; kk < kKeys / 16; ++kk) pack_columns(pr[kk], s + kk * 8);
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) o[i] *= rescale[i / 2 % 2];
    }
    mbarrier_wait(bar->v_full + v_ring.stage, v_ring.phase);
    hold_registers(pr);
    hold_registers(o);
    wgmma_fence();
    issue_pv(r.n_last > r.n_first);
    wgmma_wait<0>();
    hold_registers(o);
    release(bar->v_empty + v_ring.stage);
    v_ring.advance();

    // Epilogue. z0 and the maximum go through the same product with scale_log2, and the sum is at least 1,
    // the weight of the maximum, so that z0 <= lse with any rounding.
    float scale_o[2], scale_y[2], headwise[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = rows.sum[i], z0 = rows.z0[i];
#pragma unroll
      for (int lanes = 1; lanes <= 2; lanes *= 2) {
        sum += __shfl_xor_sync(kFullWarp, sum, lanes);
        z0 = fmaxf(z0, __shfl_xor_sync(kFullWarp, z0, lanes));
      }
      sum = fmaxf(sum, 1.0f);
      const float lse = softmax_lse(rows.max[i], p.scale_log2, sum) * kLn2;
      const bool inside = rows.row[i] < p.queries;
      if (t4 == 0 && inside) {
        const int64_t at = static_cast<int64_t>(r.head) * p.queries + rows.row[i];
        p.lse[at] = lse;
        if (p.z0) p.z0[at] = z0 * p.scale_log2 * kLn2;
      }
      scale_o[i] = __fdividef(1.0f, sum);
      scale_y[i] = p.sink ? sigmoid(lse - to_float(p.sink[r.head])) : 1.0f;
      headwise[i] =
          p.gate && inside ? to_float(p.gate[static_cast<int64_t>(rows.row[i]) * p.heads + r.head]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] *= scale_o[i / 2 % 2];
    sync_consumer(consumer);  // the leader has waited for the stores of the previous tile
    if (p.elementwise) mbarrier_wait(&bar->z_full, phase);
#pragma unroll
    for (int c = 0; c < kDim / 16; ++c) {  // 16 columns
      const uint32_t at = (c / 4) * 8192 + swizzled(warp * 16 + lane % 16, c % 4 * 2 + lane / 16);
      uint32_t out[4];
      pack_columns(out, o + c * 8);
      stmatrix_x4(smem_addr(stage_o) + at, out);
      if (!p.fused) continue;
      uint32_t z[4];
      if (p.elementwise) ldmatrix_x4(z, smem_addr(stage_y) + at);
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int i = v % 2;
        float y[2] = {o[c * 8 + 2 * v] * scale_y[i], o[c * 8 + 2 * v + 1] * scale_y[i]};
        if (p.elementwise) {
          y[0] = apply_gate(y[0], __uint_as_float(z[v] << 16), p.kind);
          y[1] = apply_gate(y[1], __uint_as_float(z[v] & 0xffff0000u), p.kind);
        } else if (p.gate) {
          y[0] = apply_gate(y[0], headwise[i], p.kind);
          y[1] = apply_gate(y[1], headwise[i], p.kind);
        }
        out[v] = pack_bf16(y[0], y[1]);
      }
      stmatrix_x4(smem_addr(stage_y) + at, out);
    }
    fence_proxy_async();
    sync_consumer(consumer);
    if (leader) {
      for (int c = 0; c < Tile::kChunks; ++c) {
        tma_store_3d(map_o, stage_o + c * 8192, c * 64, r.head, r.q0 + consumer * 64);
        if (p.fused) tma_store_3d(map_y, stage_y + c * 8192, c * 64, r.head, r.q0 + consumer * 64);
      }
      tma_store_commit();
      stored = true;
    }
  }
  if (stored) tma_store_wait_read<0>();
  if (consumer == 0) await_turn(consumer);  // takes the last turn, for which no other consumer waits
}

template <int kDim>
__global__ void __launch_bounds__(ForwardTile<kDim>::kThreads, 1)
    attention_forward_kernel(const ForwardParams p, const __grid_constant__ TensorMap map_q,
                             const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
                             const __grid_constant__ TensorMap map_o, const __grid_constant__ TensorMap map_y,
                             const __grid_constant__ TensorMap map_z) {
  using Tile = ForwardTile<kDim>;
  DYN_SMEM(unsigned char, smem, 1024);
  auto* bar = reinterpret_cast<typename Tile::Barriers*>(smem + 3 * Tile::kQueryBytes +
                                                         2 * Tile::kStages * Tile::kKeyBytes);
  if (threadIdx.x == 0) {
    constexpr unsigned kWarps = 4 * Tile::kConsumers;
    mbarrier_init(&bar->q_full, 1);
    mbarrier_init(&bar->q_empty, kWarps);
    mbarrier_init(&bar->z_full, 1);
    mbarrier_init(&bar->z_empty, Tile::kConsumers);
    for (int s = 0; s < Tile::kStages; ++s) {
      mbarrier_init(bar->k_full + s, 1);
      mbarrier_init(bar->v_full + s, 1);
      mbarrier_init(bar->k_empty + s, kWarps);
      mbarrier_init(bar->v_empty + s, kWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int group = uniform(static_cast<int>(threadIdx.x) / 128);
  if (group == 0) {
    setmaxnreg_dec<Tile::kProducerRegisters>();
    if (threadIdx.x == 0) produce<kDim>(p, smem, bar, &map_q, &map_k, &map_v, &map_z);
  } else {
    setmaxnreg_inc<Tile::kConsumerRegisters>();
    consume<kDim>(p, smem, bar, &map_o, &map_y, group - 1);
  }
}

template <int kDim>
void launch_forward(Context& ctx, const AttentionForward& a, int* counter) {
  using Tile = ForwardTile<kDim>;
  ForwardParams p = {};
  p.visible = a.visible;
  p.lse = a.lse, p.z0 = a.z0;
  p.sink = a.sink, p.gate = a.headwise ? a.gate : nullptr;
  p.fused = a.y != nullptr, p.elementwise = a.y && a.gate && !a.headwise;
  p.kind = a.kind;
  p.queries = static_cast<int>(a.queries);
  p.heads = a.heads, p.group = a.heads / a.kv_heads;
  p.query_blocks = static_cast<int>(blocks_for(a.queries, Tile::kQueries));
  p.tiles = p.query_blocks * a.heads;
  p.section = heads_per_section(a.keys * kDim * 4, a.kv_heads) * p.group;
  p.counter = counter;
  p.scale_log2 = a.scale * kLog2e;
  const auto queries = [&](const char* what, const nv_bf16* x) {
    return make_tensor_map_3d(what, x, a.queries, a.heads, kDim, 64, 1, 64);
  };
  const auto keys = [&](const char* what, const nv_bf16* x) {
    return make_tensor_map_3d(what, x, a.keys, a.kv_heads, kDim, Tile::kKeys, 1, 64);
  };
  const TensorMap q = queries("q", a.q), k = keys("k", a.k), v = keys("v", a.v), o = queries("o", a.o);
  const TensorMap y = p.fused ? queries("y", a.y) : o, z = p.elementwise ? queries("gate", a.gate) : q;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>(min(p.tiles, num_multiprocessors(ctx))));
  config.block = dim3(Tile::kThreads);
  config.smem = Tile::kSmemBytes;
  launch(ctx, "attention_hopper_forward", config, attention_forward_kernel<kDim>, p, q, k, v, o, y, z);
}

}  // namespace

bool attention_hopper_supports(int head_dim) { return head_dim == 64 || head_dim == 128; }

void attention_hopper_forward(Context& ctx, const AttentionForward& a) {
  SLUICE_CHECK(attention_hopper_supports(a.head_dim), "attention_hopper_forward: head_dim {}", a.head_dim);
  ScratchScope t(ctx.scratch);
  int* counter = device_data<int>(t.alloc("attention.next_tile", DType::i32, {1}));
  if (ctx.dry_run || a.queries == 0) return;
  check(cudaMemsetAsync(counter, 0, sizeof(int), stream(ctx)), "cudaMemsetAsync", "attention.next_tile");
  if (a.head_dim == 64)
    launch_forward<64>(ctx, a, counter);
  else
    launch_forward<128>(ctx, a, counter);
}

}  // namespace sluice::cuda
