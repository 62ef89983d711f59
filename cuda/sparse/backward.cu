// Attention over selected keys, backward, on mma.sync m16n8k16 in bf16. dQ comes from tiles of queries that
// go through the union of their keys, as forward does. dK and dV come from blocks of 64 keys, which go
// through the tiles of queries that have selected any of them, in ascending order, found in a bit map that a
// kernel makes before: no sum crosses a block, so bits never change. The second costs as much for a tile with
// one common key as for one with all, which is most of dense attention's work even where a query selects one
// key in a hundred: there, partials.cu sums dK and dV instead. Not yet run on a GPU.
#include "common/map.cuh"
#include "sparse/attention.h"
#include "sparse/backward.cuh"

namespace sluice::cuda {
namespace {

// ---- dQ

/// A block per tile of queries and kv head, late ones first.
template <int kDepth, int kRows>
__global__ void __launch_bounds__(2 * kRows, kRows == kPartRows ? 8 : 1) sparse_dq_kernel(Backward a) {
  using S = UnionTiles<kDepth, kRows, 2>;
  constexpr int kKeys = S::kKeys, kThreads = S::kThreads;
  DYN_SMEM(unsigned char, smem, 1024);
  const uint32_t q_tile = smem_addr(smem), do_tile = q_tile + S::kTile, k_tile = q_tile + S::kK,
                 v_tile = q_tile + S::kV;
  auto& shared = *reinterpret_cast<typename S::Keys::Shared*>(smem + S::kList);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32,
            kv_head = static_cast<int>(blockIdx.x) % a.kv_heads;
  const TileRows of =
      tile_rows(a, kv_head, (gridDim.x - 1 - blockIdx.x) / static_cast<unsigned>(a.kv_heads), kRows);
  const int tokens = of.rows >> a.group_bits, set = kv_head / (a.kv_heads / a.sets);
  if (!a.choice.mine(kRows, set, of.t0)) return;
  typename S::Keys list(shared, a.selected, set, of.t0, tokens);
  load_tile_rows_async<kRows, kDepth, kThreads>(q_tile, a.q, of);
  load_tile_rows_async<kRows, kDepth, kThreads>(do_tile, a.d_o, of);
  cp_async_commit();

  const int row0 = warp * 16 + (lane >> 2), first_max = a.selected.first_key[of.t0 + tokens - 1];
  int token[2], first[2];
  float lse[2], delta[2], coef0[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = min(row0 + 8 * i, of.rows - 1);  // rows behind the last have no members
    token[i] = (row0 + 8 * i) >> a.group_bits;
    lse[i] = a.lse[of.statistic(r)] * kLog2e, delta[i] = a.delta[of.statistic(r)];
    coef0[i] = a.coef0 ? a.coef0[of.statistic(r)] : 0.0f;
    first[i] = a.selected.first_key[of.t0 + of.token(r)];
  }
  const uint32_t a_lane = swizzled<kDepth>(warp * 16 + fragment_row(lane), fragment_chunk(lane)),
                 b_lane = swizzled<kDepth>(fragment_row_t(lane), fragment_chunk_t(lane)),
                 mix_lane = k_tile + swizzled<kDepth>(fragment_row(lane), fragment_chunk(lane));
  const int64_t stride = static_cast<int64_t>(a.kv_heads) * kDepth;
  const float scale = a.scale * kLog2e;
  float acc[kDepth / 8][4] = {};

  for (int tiles = list.list(); tiles > 0; tiles = list.list()) {
    for (int j = 0; j < tiles; ++j) {
      if (j > 0) __syncthreads();  // the last tile has been read
      gather_keys_and_values<kKeys, kDepth, kThreads>(k_tile, v_tile, a.k + kv_head * kDepth,
                                                      a.v + kv_head * kDepth, stride, list, j);
      float s[kKeys / 8][4] = {}, dp[kKeys / 8][4] = {};
      multiply_rows<kDepth>(s, q_tile + a_lane, k_tile + b_lane);
      multiply_rows<kDepth>(dp, do_tile + a_lane, v_tile + b_lane);
      const bool begins = list.keys(j)[0] <= first_max;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * n + 2 * (lane & 3) + e;
          const unsigned members = list.members(j, column);
          const int key = begins && column < list.valid(j) ? list.keys(j)[column] : -1;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = s[n][2 * i + e];
            const float weight = ex2(x * scale - lse[i]) * (dp[n][2 * i + e] - delta[i]);
            x = members >> token[i] & 1 ? weight + (key == first[i] ? coef0[i] : 0.0f) : 0.0f;
          }
        }
      multiply_weights<kDepth>(acc, s, mix_lane);
    }
  }
  write_tile_rows<kDepth>(a.dq, smem, acc, a.scale, a.scale, of);
}

// ---- dK and dV

constexpr int kKeyRows = 64, kQueryRows = 32, kKeyThreads = 128;

struct Touched {
  unsigned*
      bits;  // (G, tiles, words): bit b: whether a query of the tile selects one of keys [64 b, 64 b + 64)
  int tiles, words;
};

/// Grid (tiles of kQueryRows rows, sets); dynamic shared memory: the words of a tile.
__global__ void __launch_bounds__(kKeyThreads) sparse_touched_kernel(Backward a, Touched touched) {
  DYN_SMEM(unsigned, words, 16);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, set = static_cast<int>(blockIdx.y);
  const int64_t tile = blockIdx.x;
  const TileRows of = tile_rows(a, 0, tile, kQueryRows);
  for (int i = thread; i < touched.words; i += kKeyThreads) words[i] = 0;
  __syncthreads();
  for (int i = thread / 32; i < of.rows >> a.group_bits; i += kKeyThreads / 32) {
    const int64_t row = set * a.selected.queries + of.t0 + i;
    const int* const list = a.selected.first + row * a.selected.room;
    const int n = a.selected.count[row], last = a.selected.last(of.t0 + i);
    for (int e = lane; e < n; e += 32)
      for (int b = list[e] / kKeyRows; b <= min(list[e] + a.selected.block - 1, last) / kKeyRows; ++b)
        atomicOr(&words[b / 32], 1u << (b % 32));
  }
  __syncthreads();
  unsigned* const out = touched.bits + (static_cast<int64_t>(set) * touched.tiles + tile) * touched.words;
  for (int i = thread; i < touched.words; i += kKeyThreads) out[i] = words[i];
}

template <int kDepth>
struct DkvTile {
  static constexpr int kRowBytes = 2 * kDepth;
  static constexpr int kV = kKeyRows * kRowBytes, kQ = 2 * kV, kDo = kQ + kQueryRows * kRowBytes;
  static constexpr size_t kSmem = kDo + kQueryRows * kRowBytes;
};

/// Grid (kv heads, blocks of keys), early ones, which most queries see, first. A warp owns 16 keys, which are
/// the rows here: weights leave the tensor cores as the left operands of dV += P dO and dK += dS Q.
template <int kDepth>
__global__ void __launch_bounds__(kKeyThreads, 2) sparse_dkv_kernel(Backward a, Touched touched) {
  using S = DkvTile<kDepth>;
  DYN_SMEM(unsigned char, smem, 1024);
  STATIC_SMEM(unsigned, votes, [kKeyThreads / 32]);
  STATIC_SMEM(unsigned, members, [kKeyRows]);  // of each key: which queries of the tile have selected it
  STATIC_SMEM(RowStatistics<kQueryRows>, statistics, [1]);
  const uint32_t k_tile = smem_addr(smem), v_tile = k_tile + S::kV, q_tile = k_tile + S::kQ,
                 do_tile = k_tile + S::kDo;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32,
            kv_head = static_cast<int>(blockIdx.x), set = kv_head / (a.kv_heads / a.sets),
            k0 = static_cast<int>(blockIdx.y) * kKeyRows;
  const int64_t stride = static_cast<int64_t>(a.kv_heads) * kDepth, at = k0 * stride + kv_head * kDepth;
  const int keys = static_cast<int>(a.selected.keys) - k0;
  load_rows_async<kKeyRows, kDepth, kKeyThreads>(k_tile, a.k + at, static_cast<int>(stride), keys);
  load_rows_async<kKeyRows, kDepth, kKeyThreads>(v_tile, a.v + at, static_cast<int>(stride), keys);
  cp_async_commit();

  const int key0 = warp * 16 + (lane >> 2);  // this lane's keys are k0 + key0 and k0 + key0 + 8
  const uint32_t a_lane = swizzled<kDepth>(warp * 16 + fragment_row(lane), fragment_chunk(lane));
  const float scale = a.scale * kLog2e;
  const unsigned* const of_keys =
      touched.bits + static_cast<int64_t>(set) * touched.tiles * touched.words + k0 / kKeyRows / 32;
  const unsigned bit = 1u << (k0 / kKeyRows % 32);
  float dk[kDepth / 8][4] = {}, dv[kDepth / 8][4] = {};

  for (int tile0 = a.selected.own.first_query(k0) / (kQueryRows >> a.group_bits); tile0 < touched.tiles;
       tile0 += kKeyThreads) {
    const int mine = tile0 + thread;
    const unsigned vote = __ballot_sync(
        kFullWarp, mine < touched.tiles && (of_keys[static_cast<int64_t>(mine) * touched.words] & bit) != 0);
    __syncthreads();  // the last votes have been read
    if (lane == 0) votes[warp] = vote;
    __syncthreads();
    for (int w = 0; w < kKeyThreads / 32; ++w)
      for (unsigned left = votes[w]; left != 0; left &= left - 1) {
        const int tile = tile0 + 32 * w + __ffs(static_cast<int>(left)) - 1;
        const TileRows of = tile_rows(a, kv_head, tile, kQueryRows);
        __syncthreads();  // the last tile has been read
        load_tile_rows_async<kQueryRows, kDepth, kKeyThreads>(q_tile, a.q, of);
        load_tile_rows_async<kQueryRows, kDepth, kKeyThreads>(do_tile, a.d_o, of);
        cp_async_commit();
        if (thread < kKeyRows) members[thread] = 0;
        if (thread < kQueryRows) statistics[0].load(a, of, thread);
        __syncthreads();
        if (thread < of.rows >> a.group_bits) {
          const int64_t row = set * a.selected.queries + of.t0 + thread;
          const int* list = a.selected.first + row * a.selected.room;
          const int last = a.selected.last(of.t0 + thread), end = min(k0 + kKeyRows, last + 1);
          int n = a.selected.count[row];
          const int* const stop = list + n;
          while (n > 0) {  // the first block that ends behind k0
            const int half = n / 2;
            if (list[half] + a.selected.block <= k0)
              list += half + 1, n -= half + 1;
            else
              n = half;
          }
          for (; list < stop && *list < end; ++list)
            for (int s = max(*list, k0); s < min(*list + a.selected.block, end); ++s)
              atomicOr(&members[s - k0], 1u << thread);
        }
        cp_async_wait<0>();
        __syncthreads();
        add_key_gradients<kDepth>(
            dk, dv, k_tile + a_lane, v_tile + a_lane, q_tile, do_tile, statistics[0], 0,
            [&](int i) { return k0 + key0 + 8 * i; }, [&](int i) { return members[key0 + 8 * i]; },
            a.group_bits, scale);
      }
  }
  cp_async_wait<0>();  // of the keys, where no query has selected any
  __syncthreads();     // each thread waits for its own copies, into rows of other warps too
  write_rows<kDepth>(smem, dk, a.scale);
  write_rows<kDepth>(smem + S::kV, dv, 1.0f);
  constexpr int kChunks = kDepth / 8;
#pragma unroll 2
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int r = warp * 16 + i / kChunks, chunk = i % kChunks;
    if (r >= keys) break;
    const uint32_t from = swizzled<kDepth>(r, chunk);
    store_vec<8>(a.dk + at + r * stride + chunk * 8, *reinterpret_cast<const Vec16<nv_bf16>*>(smem + from));
    store_vec<8>(a.dv + at + r * stride + chunk * 8,
                 *reinterpret_cast<const Vec16<nv_bf16>*>(smem + S::kV + from));
  }
}

template <int kDepth, int kRows>
void launch_dq(Context& ctx, const Backward& a) {
  launch(ctx, "sparse_dq", UnionTiles<kDepth, kRows, 2>::config(a.kv_heads, a.selected.queries, a.group_bits),
         sparse_dq_kernel<kDepth, kRows>, a);
}

template <int kDepth>
void launch_all_dq(Context& ctx, const Backward& a) {
  if (whole_tile_rows(a.group_bits) == 32)
    launch_dq<kDepth, 32>(ctx, a);
  else
    launch_dq<kDepth, 64>(ctx, a);
  if (a.choice.divided) launch_dq<kDepth, kPartRows>(ctx, a);
}

template <int kDepth>
void launch_dkv(Context& ctx, const Backward& a, const Touched& touched) {
  launch(ctx, "sparse_touched",
         {.grid = dim3(static_cast<unsigned>(touched.tiles), static_cast<unsigned>(a.sets)),
          .block = dim3(kKeyThreads),
          .smem = static_cast<size_t>(touched.words) * sizeof(unsigned)},
         sparse_touched_kernel, a, touched);
  launch(ctx, "sparse_dkv",
         {.grid = dim3(static_cast<unsigned>(a.kv_heads), blocks_for(a.selected.keys, kKeyRows)),
          .block = dim3(kKeyThreads),
          .smem = DkvTile<kDepth>::kSmem},
         sparse_dkv_kernel<kDepth>, a, touched);
}

/// dK and dV by blocks of keys.
void key_gradients(Context& ctx, ScratchScope& scratch, const Backward& a, int64_t depth) {
  Touched touched = {};
  touched.tiles = static_cast<int>(blocks_for(a.selected.queries, kQueryRows >> a.group_bits));
  touched.words = static_cast<int>(blocks_for(a.selected.keys, kKeyRows * 32));
  const Tensor bits = scratch.alloc("sparse touched", DType::i32, {a.sets, touched.tiles, touched.words});
  if (ctx.dry_run) return;
  touched.bits = device_data<unsigned>(bits);
  if (depth == 64)
    launch_dkv<64>(ctx, a, touched);
  else
    launch_dkv<128>(ctx, a, touched);
}

}  // namespace

void sparse_union_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o, const Tensor& delta,
                           const AttentionInputs& in, const VisibleKeys& visible, const Tensor& lse,
                           const Tensor& coef0, const Selection& keys) {
  Backward a = {};
  a.heads = static_cast<int>(in.q.dim(1)), a.kv_heads = static_cast<int>(in.k.dim(1));
  a.sets = static_cast<int>(keys.first.dim(0)), a.scale = static_cast<float>(in.scale);
  a.group_bits = group_bits_of(a.heads, a.kv_heads);
  a.q = device_data<nv_bf16>(in.q), a.k = device_data<nv_bf16>(in.k), a.v = device_data<nv_bf16>(in.v);
  a.d_o = device_data<nv_bf16>(d_o), a.lse = device_data<float>(lse), a.delta = device_data<float>(delta);
  a.coef0 = coef0 ? device_data<float>(coef0) : nullptr;
  a.dq = device_data<nv_bf16>(grads.dq), a.dk = device_data<nv_bf16>(grads.dk);
  a.dv = device_data<nv_bf16>(grads.dv);
  a.selected = selected_of(visible, keys);
  ScratchScope scratch(ctx.scratch);
  const int64_t depth = in.q.dim(2);
  a.choice = choose_tiles(ctx, scratch, a.selected, a.sets, a.group_bits);
  if (!ctx.dry_run) depth == 64 ? launch_all_dq<64>(ctx, a) : launch_all_dq<128>(ctx, a);
  if (few_select_a_key(a.selected))
    partial_key_gradients(ctx, scratch, a, depth);
  else
    key_gradients(ctx, scratch, a, depth);
}

}  // namespace sluice::cuda
