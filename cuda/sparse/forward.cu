// Attention over selected keys, forward, on mma.sync m16n8k16 in bf16. A block owns a tile of rows: a few
// consecutive queries times the query heads of one key/value head, and goes through the union of these
// queries' keys (sparse/union.cuh) in tiles of 64, whose rows of K and V it gathers into shared memory; a key
// that a query has not selected is masked by its bit. Neighbouring queries select much the same keys, so that
// a gathered row serves many of them: bound by the second cache where they do not, by the tensor cores where
// they do. K and V have one buffer each, and each is filled while the other is used. Not yet run on a GPU.
#include "common/map.cuh"
#include "common/math.cuh"
#include "sparse/attention.h"
#include "sparse/tiles.cuh"

namespace sluice::cuda {
namespace {

struct Forward {
  const nv_bf16 *q, *k, *v;
  nv_bf16* o;
  float *lse, *z0;  // z0 may be null
  Selected selected;
  TileChoice choice;
  int heads, kv_heads, sets, group_bits;  // a group of 2^group_bits query heads
  float scale;
};

/// A block per tile of queries and kv head; late queries, which have most keys to go through, first.
template <int kDepth, int kRows>
__global__ void __launch_bounds__(2 * kRows, kRows == kPartRows ? 8 : 1) sparse_forward_kernel(Forward a) {
  using S = UnionTiles<kDepth, kRows, 1>;
  constexpr int kKeys = S::kKeys, kThreads = S::kThreads;
  DYN_SMEM(unsigned char, smem, 1024);
  const uint32_t q_tile = smem_addr(smem), k_tile = q_tile + S::kK, v_tile = q_tile + S::kV;
  auto& shared = *reinterpret_cast<typename S::Keys::Shared*>(smem + S::kList);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int kv_head = static_cast<int>(blockIdx.x) % a.kv_heads, group = 1 << a.group_bits,
            head0 = kv_head * group, tile_tokens = kRows >> a.group_bits;
  const int64_t t0 = static_cast<int64_t>((gridDim.x - 1 - blockIdx.x) / static_cast<unsigned>(a.kv_heads)) *
                     tile_tokens,
                left = a.selected.queries - t0;
  const int tokens = left < tile_tokens ? static_cast<int>(left) : tile_tokens, rows = tokens * group,
            set = kv_head / (a.kv_heads / a.sets);
  if (!a.choice.mine(kRows, set, t0)) return;
  typename S::Keys list(shared, a.selected, set, t0, tokens);

  const TileRows of = {t0, a.selected.queries, rows, head0, a.heads, a.group_bits};
  load_tile_rows_async<kRows, kDepth, kThreads>(q_tile, a.q, of);
  cp_async_commit();
  if (a.z0)
    for (int r = thread; r < rows; r += kThreads) {
      const int64_t t = t0 + (r >> a.group_bits);
      if (a.selected.first[(set * a.selected.queries + t) * a.selected.room] != a.selected.first_key[t])
        a.z0[of.statistic(r)] = static_cast<float>(kNotSelected);
    }

  const int row0 = warp * 16 + (lane >> 2);  // this lane's rows are row0 and row0 + 8
  const int token[2] = {row0 >> a.group_bits, (row0 + 8) >> a.group_bits};
  const int first_max = a.selected.first_key[t0 + tokens - 1];
  const uint32_t q_lane = q_tile + swizzled<kDepth>(warp * 16 + fragment_row(lane), fragment_chunk(lane)),
                 k_lane = k_tile + swizzled<kDepth>(fragment_row_t(lane), fragment_chunk_t(lane)),
                 v_lane = v_tile + swizzled<kDepth>(fragment_row(lane), fragment_chunk(lane));
  const int64_t stride = static_cast<int64_t>(a.kv_heads) * kDepth;
  const auto load = [&](uint32_t tile, const nv_bf16* src, int j) {
    gather_rows_async<kKeys, kDepth, kThreads>(tile, src + kv_head * kDepth, stride, list.keys(j),
                                               list.valid(j));
    cp_async_commit();
  };
  const float scale = a.scale * kLog2e;
  float acc[kDepth / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};

  for (int tiles = list.list(); tiles > 0; tiles = list.list()) {
    load(k_tile, a.k, 0);
    for (int j = 0; j < tiles; ++j) {
      cp_async_wait<0>();
      __syncthreads();  // K_j has arrived, and V_{j-1} is no longer read
      load(v_tile, a.v, j);
      float s[kKeys / 8][4] = {};
      multiply_rows<kDepth>(s, q_lane, k_lane);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * n + 2 * (lane & 3) + e;
          const unsigned members = list.members(j, column);
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (!(members >> token[i] & 1)) s[n][2 * i + e] = -INFINITY;
        }
      if (a.z0 && list.keys(j)[0] <= first_max) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = 8 * n + 2 * (lane & 3) + e;
            if (column >= list.valid(j)) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int r = row0 + 8 * i;
              if (r >= rows || list.keys(j)[column] != a.selected.first_key[t0 + token[i]]) continue;
              if (s[n][2 * i + e] != -INFINITY) a.z0[of.statistic(r)] = s[n][2 * i + e] * scale * kLn2;
            }
          }
      }
      cp_async_wait<0>();
      __syncthreads();  // V_j has arrived, and K_j is no longer read
      if (j + 1 < tiles) load(k_tile, a.k, j + 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = m[i];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
        const float shift = softmax_base(top, scale), rescale = softmax_rescale(m[i], scale, shift);
        m[i] = top;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[n][2 * i + e];
            x = ex2(x * scale - shift);
            sum += x;
          }
        l[i] = l[i] * rescale + sum;
#pragma unroll
        for (int n = 0; n < kDepth / 8; ++n) acc[n][2 * i] *= rescale, acc[n][2 * i + 1] *= rescale;
      }
      multiply_weights<kDepth>(acc, s, v_lane);
    }
  }

  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = l[i];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    sum = fmaxf(sum, 1.0f);  // the largest term is 1 but for rounding: with it lse >= z0
    inverse[i] = __fdividef(1.0f, sum);
    const int r = row0 + 8 * i;
    if ((lane & 3) == 0 && r < rows) a.lse[of.statistic(r)] = softmax_lse(m[i], scale, sum) * kLn2;
  }
  write_tile_rows<kDepth>(a.o, smem, acc, inverse[0], inverse[1], of);  // over Q
}

template <int kDepth, int kRows>
void launch_tiles(Context& ctx, const Forward& a) {
  launch(ctx, "sparse_union_forward",
         UnionTiles<kDepth, kRows, 1>::config(a.kv_heads, a.selected.queries, a.group_bits),
         sparse_forward_kernel<kDepth, kRows>, a);
}

template <int kDepth>
void launch_forward(Context& ctx, const Forward& a) {
  if (whole_tile_rows(a.group_bits) == 32)
    launch_tiles<kDepth, 32>(ctx, a);
  else
    launch_tiles<kDepth, 64>(ctx, a);
  if (a.choice.divided) launch_tiles<kDepth, kPartRows>(ctx, a);
}

}  // namespace

bool sparse_tensor_cores(const AttentionInputs& in) {
  const int64_t group = in.q.dim(1) / in.k.dim(1), depth = in.q.dim(2);
  return in.q.dtype == DType::bf16 && (depth == 64 || depth == 128) && group <= 32 &&
         (group & (group - 1)) == 0 && aligned(in.q.data, in.k.data, in.v.data);
}

void sparse_union_forward(Context& ctx, const AttentionState& out, const AttentionInputs& in,
                          const VisibleKeys& visible, const Selection& keys) {
  Forward a = {};
  a.selected = selected_of(visible, keys);
  a.heads = static_cast<int>(in.q.dim(1)), a.kv_heads = static_cast<int>(in.k.dim(1));
  a.sets = static_cast<int>(keys.first.dim(0)), a.scale = static_cast<float>(in.scale);
  a.group_bits = group_bits_of(a.heads, a.kv_heads);
  ScratchScope scratch(ctx.scratch);
  a.choice = choose_tiles(ctx, scratch, a.selected, a.sets, a.group_bits);
  if (ctx.dry_run) return;
  a.q = device_data<nv_bf16>(in.q), a.k = device_data<nv_bf16>(in.k), a.v = device_data<nv_bf16>(in.v);
  a.o = device_data<nv_bf16>(out.o), a.lse = device_data<float>(out.lse);
  a.z0 = out.z0 ? device_data<float>(out.z0) : nullptr;
  if (in.q.dim(2) == 64)
    launch_forward<64>(ctx, a);
  else
    launch_forward<128>(ctx, a);
}

}  // namespace sluice::cuda
