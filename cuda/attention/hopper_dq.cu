// The last part of Hopper's backward: dq from the f32 sums that hopper_backward.cu leaves in the order of its
// registers, and on through the rotary embedding and the norm of heads, if queries were made by them: dq
// itself is then neither written nor rounded.
//
// A block takes a head, and of its tiles of 64 queries every `chunks`th. It turns a tile through shared
// memory; then kLanes threads have a row, lane l the columns l 8 and D/2 + l 8, as in rope_rows.cuh, and keep
// the gradient of the norm's weight in registers over all their rows. Bound by memory. Not yet run on a GPU.
#include "attention/hopper_dq.h"
#include "common/launch.h"
#include "rope_rows.cuh"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256, kN = 8;
enum class Made { plainly, by_rope, by_norm_rope };  // the queries

struct DqParams {
  const float* sums;  // (H, tiles, 64 D), in the order of registers
  nv_bf16* dx;        // dq, or the gradient of what the queries were made from
  int64_t dx_row;     // elements from one token's dx to the next's
  int64_t tokens;
  int heads, tiles, chunks;
  float scale;
  // by_rope, by_norm_rope
  RopeTable table;
  // by_norm_rope
  const nv_bf16 *x, *weight;  // weight null: ones
  int weight_row;             // 0, or D for a weight per head
  const float* rstd;          // (T H)
  float* partials;            // (chunks H, D): of the weight's gradient; null without a weight
};

/// What a thread prefetches of a tile: its vectors of the sums, then the two of x of each of its rows.
template <int kDim, Made kMade>
struct NextTile {
  static constexpr int kLanes = kDim / 2 / kN, kGroups = kThreads / kLanes, kRows = kDqTile / kGroups;
  static constexpr int kSums = kDqTile * kDim / 4 / kThreads;
  static constexpr int x(int row, int side) { return kSums + 2 * row + side; }
  using Vectors = Prefetch<kThreads, kSums + (kMade == Made::by_norm_rope ? 2 * kRows : 0)>;
};

/// Rows of shared memory are this long, so that the writes of a warp meet in no bank, and its reads at most
/// two at a time.
template <int kDim>
constexpr int kSharedRow = kDim + 4;

/// Vector v of a tile's sums times `scale` to where it belongs: two columns of two queries.
template <int kDim>
DEVICE_INLINE void turn(float* rows, int v, const Vec16<float>& sums, float scale) {
  constexpr int kConsumerQueries = kDim == 64 ? 32 : 64, kPerConsumer = kConsumerQueries * 64 / 4;
  const int consumer = v / kPerConsumer, i = v % kPerConsumer / 128, thread = v % 128, lane = thread % 32;
  const int column = (kDim == 64 ? 0 : consumer * 64) + thread / 32 * 16 + lane / 4;
  const int query = (kDim == 64 ? consumer * 32 : 0) + i * 8 + lane % 4 * 2;
  float* const at = rows + query * kSharedRow<kDim> + column;
  at[0] = sums.v[0] * scale, at[kSharedRow<kDim>] = sums.v[1] * scale;
  at[8] = sums.v[2] * scale, at[kSharedRow<kDim> + 8] = sums.v[3] * scale;
}

/// Block (chunk, head). The next tile is on its way while this one is computed.
template <int kDim, Made kMade>
__global__ void __launch_bounds__(kThreads, 2) attention_dq_kernel(DqParams p) {
  using Next = NextTile<kDim, kMade>;
  constexpr int kHalf = kDim / 2, kLanes = Next::kLanes, kGroups = Next::kGroups, kRows = Next::kRows;
  constexpr bool kRope = kMade != Made::plainly, kNorm = kMade == Made::by_norm_rope;
  DYN_SMEM(float, rows, 16);
  typename Next::Vectors next(reinterpret_cast<char*>(rows + kDqTile * kSharedRow<kDim>));
  const int head = static_cast<int>(blockIdx.x) % p.heads, chunk = static_cast<int>(blockIdx.x) / p.heads;
  const int group = static_cast<int>(threadIdx.x) / kLanes, i = static_cast<int>(threadIdx.x) % kLanes * kN;
  const auto token_of = [&](int tile, int k) { return int64_t{tile} * kDqTile + k * kGroups + group; };
  float next_r[kRows] = {};
  int next_position[kRows];  // -1: outside of the table
  const auto ask = [&](int tile) {
    if (tile < p.tiles) {
      const float* const from =
          p.sums + (static_cast<int64_t>(head) * p.tiles + tile) * (kDqTile * kDim) + threadIdx.x * 4;
#pragma unroll
      for (int k = 0; k < Next::kSums; ++k) next.ask(k, from + k * (kThreads * 4));
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const int64_t token = token_of(tile, k), row = token * p.heads + head;
        next_position[k] = -1;
        if (token >= p.tokens) continue;
        if constexpr (kRope) next_position[k] = p.table.row(token) < 0 ? -1 : p.table.positions[token];
        if constexpr (kNorm) {
          next_r[k] = p.rstd[row];
#pragma unroll
          for (int side = 0; side < 2; ++side)
            next.ask(Next::x(k, side), p.x + row * kDim + side * kHalf + i);
        }
      }
    }
    next.commit();
  };
  ask(chunk);
  [[maybe_unused]] GroupSum<kThreads, kLanes> group_sum;
  float dw[2][kN] = {};
  for (int tile = chunk; tile < p.tiles; tile += p.chunks) {
    next.wait();
#pragma unroll
    for (int k = 0; k < Next::kSums; ++k)
      turn<kDim>(rows, k * kThreads + static_cast<int>(threadIdx.x), next.template read<float>(k), p.scale);
    Vec<nv_bf16, kN> x[kRows][2] = {};  // what was not asked for is read, too, and not used
    float r[kRows] = {};
    int position[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      r[k] = next_r[k], position[k] = next_position[k];
      if constexpr (kNorm) {
#pragma unroll
        for (int side = 0; side < 2; ++side) x[k][side] = next.template read<nv_bf16>(Next::x(k, side));
      }
    }
    ask(tile + p.chunks);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t token = token_of(tile, k);
      const bool real = token < p.tokens;  // every thread stays for the sums over its group
      const float* const from = rows + (k * kGroups + group) * kSharedRow<kDim> + i;
      NormRow<kN> row;
      float gx = 0;
      if (real) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          to_floats(row.d[side], load_vec<kN>(from + side * kHalf));
          if constexpr (kNorm) {
            to_floats(row.x[side], x[k][side]);
            to_floats(row.weight[side], load_weight<kN>(p.weight, head * p.weight_row + side * kHalf + i));
          }
        }
        if constexpr (kRope) {
          float c[kN], s[kN];
          p.table.load(int64_t{position[k]} * kHalf, i, c, s);
#pragma unroll
          for (int e = 0; e < kN; ++e) rotate(row.d[0][e], row.d[1][e], c[e], s[e]);
        }
        if constexpr (kNorm) gx = row.sums(dw, r[k]);
      }
      if constexpr (kNorm) gx = group_sum(gx);
      if (real) {
        if constexpr (kNorm) row.to_gradient(gx, r[k], kHalf);
        nv_bf16* const dx = p.dx + token * p.dx_row + head * kDim + i;
        store_vec<kN>(dx, from_floats<nv_bf16>(row.d[0]));
        store_vec<kN>(dx + kHalf, from_floats<nv_bf16>(row.d[1]));
      }
    }
    __syncthreads();
  }
  if constexpr (kNorm) {
    if (p.partials)  // of the whole launch, or none of it
      store_columns<kThreads, kLanes>(p.partials + int64_t{blockIdx.x} * kDim, dw, kHalf, kDim);
  }
}

template <int kDim, Made kMade>
void launch_dq(Context& ctx, const DqParams& p) {
  launch(ctx, "attention_hopper_dq",
         {.grid = dim3(static_cast<unsigned>(p.chunks * p.heads)),
          .block = dim3(kThreads),
          .smem = kDqTile * kSharedRow<kDim> * sizeof(float) + NextTile<kDim, kMade>::Vectors::kBytes},
         attention_dq_kernel<kDim, kMade>, p);
}

template <Made kMade>
void launch_dq(Context& ctx, const DqParams& p, int head_dim) {
  if (head_dim == 64)
    launch_dq<64, kMade>(ctx, p);
  else
    launch_dq<128, kMade>(ctx, p);
}

}  // namespace

void attention_hopper_dq(Context& ctx, const AttentionBackward& a, const float* sums) {
  const PositionBackward* const made = a.made;
  const int64_t tiles = blocks_for(a.queries, kDqTile);
  // Two blocks for each of 132 multiprocessors, of at least two tiles each; by shapes alone, on which the
  // order of the weight's gradient depends.
  const int64_t chunks = std::max<int64_t>(std::min<int64_t>((tiles + 1) / 2, 264 / a.heads), 1);
  ScratchScope scratch(ctx.scratch);
  const bool weighted = made && made->weight;
  const Tensor partials =
      weighted ? scratch.alloc("attention.dq_dweight", DType::f32, {chunks, a.heads, a.head_dim}) : Tensor();
  if (ctx.dry_run || a.queries == 0) return;
  DqParams p = {};
  p.sums = sums, p.scale = a.scale;
  p.dx = a.dq, p.dx_row = int64_t{a.heads} * a.head_dim;
  p.tokens = a.queries, p.heads = a.heads;
  p.tiles = static_cast<int>(tiles), p.chunks = static_cast<int>(chunks);
  if (!made) return launch_dq<Made::plainly>(ctx, p, a.head_dim);
  p.dx = device_data<nv_bf16>(made->dx), p.dx_row = made->dx.stride();
  p.table = rope_angles(ctx, made->positions, made->cos, made->sin, -1.f);
  if (!made->rstd) return launch_dq<Made::by_rope>(ctx, p, a.head_dim);
  const bool per_head = weighted && made->weight.rank == 2;
  p.x = device_data<nv_bf16>(made->x), p.rstd = device_data<float>(made->rstd);
  p.weight = device_data<nv_bf16>(made->weight), p.weight_row = per_head ? a.head_dim : 0;
  p.partials = device_data<float>(partials);
  launch_dq<Made::by_norm_rope>(ctx, p, a.head_dim);
  if (weighted)
    column_sums(ctx, "attention_hopper_dq dweight", device_data<float>(made->dweight), p.partials,
                per_head ? chunks : chunks * a.heads, made->weight.numel(), Into::add);
}

}  // namespace sluice::cuda
