// dK and dV of attention over selected keys where few queries select a key: tiles of queries go through the
// union of their keys, as for dQ, and leave what they add to dK and dV of each of these keys in a buffer, in
// bf16; then every key sums its rows of the buffer in f32, in the order of the queries. So the work grows
// with the selected pairs, and bits never change. Tiles take turns in the buffer, which holds kBufferFactor
// rows for each row of K. Not yet run on a GPU.
#include "sparse/backward.cuh"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 128, kKeys = 64, kBufferFactor = 8;

/// The tiles that share the buffer at a time, in their order.
struct Partials {
  nv_bf16 *dk, *dv;         // (tiles in turn, kv heads, rows, D)
  unsigned* members;        // (G, tiles in turn, words): bit i of word w: key 32 w + i is in the tile's union
  int* before;              // the same shape: keys of the union before those of the word
  float *dk_sum, *dv_sum;   // (keys, kv heads, D)
  int64_t rows;             // the largest number of keys in a tile's union
  int words, first, tiles;  // tiles [first, first + tiles)
  int turn_tiles;           // of every turn but the last
  bool begins, ends;        // the first and the last turn
};

/// Grid (tiles in turn, G); dynamic shared memory: a word for 32 keys. A place in the buffer is the rank of
/// the key in the union.
__global__ void __launch_bounds__(kThreads) sparse_union_ranks_kernel(Backward a, Partials p, int rows) {
  DYN_SMEM(unsigned, words, 16);
  STATIC_SMEM(int, sums, [kThreads]);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, set = static_cast<int>(blockIdx.y),
            slot = static_cast<int>(blockIdx.x);
  const TileRows of = tile_rows(a, 0, p.first + slot, rows);
  for (int i = thread; i < p.words; i += kThreads) words[i] = 0;
  __syncthreads();
  for (int i = thread / 32; i < of.rows >> a.group_bits; i += kThreads / 32) {
    const int64_t row = set * a.selected.queries + of.t0 + i;
    const int* const list = a.selected.first + row * a.selected.room;
    const int n = a.selected.count[row], stop = a.selected.last(of.t0 + i) + 1;
    for (int e = lane; e < n; e += 32)
      for (int k = list[e]; k < min(list[e] + a.selected.block, stop); ++k)
        atomicOr(&words[k / 32], 1u << (k % 32));
  }
  __syncthreads();
  // Every thread counts a run of words.
  const int each = (p.words + kThreads - 1) / kThreads, begin = min(thread * each, p.words),
            end = min(begin + each, p.words);
  int count = 0;
  for (int i = begin; i < end; ++i) count += __popc(words[i]);
  sums[thread] = count;
  __syncthreads();
  int before = 0;
  for (int i = 0; i < thread; ++i) before += sums[i];
  const int64_t at = (static_cast<int64_t>(set) * p.turn_tiles + slot) * p.words;
  for (int i = begin; i < end; ++i) {
    p.members[at + i] = words[i], p.before[at + i] = before;
    before += __popc(words[i]);
  }
}

template <int kDepth, int kRows>
struct PartialTile {
  using Keys = KeyUnion<kThreads, kKeys>;
  static constexpr int kRowBytes = 2 * kDepth;
  static constexpr int kDo = kRows * kRowBytes, kK = 2 * kDo, kV = kK + kKeys * kRowBytes,
                       kList = kV + kKeys * kRowBytes;
  static constexpr size_t kSmem = kList + sizeof(typename Keys::Shared);
};

/// A block per tile in turn and kv head. A warp owns 16 of the 64 keys of a step.
template <int kDepth, int kRows>
__global__ void __launch_bounds__(kThreads, 2) sparse_partial_kernel(Backward a, Partials p) {
  using S = PartialTile<kDepth, kRows>;
  DYN_SMEM(unsigned char, smem, 1024);
  STATIC_SMEM(RowStatistics<kRows>, statistics, [1]);
  const uint32_t q_tile = smem_addr(smem), do_tile = q_tile + S::kDo, k_tile = q_tile + S::kK,
                 v_tile = q_tile + S::kV;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32,
            kv_head = static_cast<int>(blockIdx.x) % a.kv_heads,
            slot = static_cast<int>(blockIdx.x) / a.kv_heads;
  const TileRows of = tile_rows(a, kv_head, p.first + slot, kRows);
  typename S::Keys list(*reinterpret_cast<typename S::Keys::Shared*>(smem + S::kList), a.selected,
                        kv_head / (a.kv_heads / a.sets), of.t0, of.rows >> a.group_bits);
  load_tile_rows_async<kRows, kDepth, kThreads>(q_tile, a.q, of);
  load_tile_rows_async<kRows, kDepth, kThreads>(do_tile, a.d_o, of);
  cp_async_commit();
  if (thread < kRows) statistics[0].load(a, of, thread);

  const int own =
      warp * 16 + (lane >> 2);  // this lane's keys are the own-th of the tile and the eighth after
  const uint32_t a_lane = swizzled<kDepth>(warp * 16 + fragment_row(lane), fragment_chunk(lane));
  const int64_t stride = static_cast<int64_t>(a.kv_heads) * kDepth;
  const float scale = a.scale * kLog2e;
  int done = 0;  // keys of the union

  for (int tiles = list.list(); tiles > 0; tiles = list.list())
    for (int j = 0; j < tiles; ++j, done += kKeys) {
      __syncthreads();  // all warps have written the last tile's rows
      gather_keys_and_values<kKeys, kDepth, kThreads>(k_tile, v_tile, a.k + kv_head * kDepth,
                                                      a.v + kv_head * kDepth, stride, list, j);
      float dk[kDepth / 8][4] = {}, dv[kDepth / 8][4] = {};
#pragma unroll 1
      for (int row0 = 0; row0 < kRows; row0 += 32)
        add_key_gradients<kDepth>(
            dk, dv, k_tile + a_lane, v_tile + a_lane, q_tile + row0 * S::kRowBytes,
            do_tile + row0 * S::kRowBytes, statistics[0], row0,
            [&](int i) { return list.keys(j)[min(own + 8 * i, list.valid(j) - 1)]; },
            [&](int i) { return list.members(j, own + 8 * i); }, a.group_bits, scale);
      write_rows<kDepth>(smem + S::kK, dk, a.scale);
      write_rows<kDepth>(smem + S::kV, dv, 1.0f);
      constexpr int kChunks = kDepth / 8;
      const int64_t to = (static_cast<int64_t>(slot) * a.kv_heads + kv_head) * p.rows + done;
#pragma unroll 2
      for (int i = lane; i < 16 * kChunks; i += 32) {
        const int r = warp * 16 + i / kChunks, chunk = i % kChunks;
        if (r >= list.valid(j)) break;
        const uint32_t from = swizzled<kDepth>(r, chunk);
        const int64_t at = (to + r) * kDepth + chunk * 8;
        store_vec<8>(p.dk + at, *reinterpret_cast<const Vec16<nv_bf16>*>(smem + S::kK + from));
        store_vec<8>(p.dv + at, *reinterpret_cast<const Vec16<nv_bf16>*>(smem + S::kV + from));
      }
    }
  cp_async_wait<0>();  // of the queries, where none has selected a key
}

/// A warp per key and kv head: adds the key's rows of the buffer, tiles in ascending order.
template <int kDepth>
__global__ void __launch_bounds__(kThreads) sparse_sum_partials_kernel(Backward a, Partials p) {
  constexpr int kEach = kDepth / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, kv_head = static_cast<int>(blockIdx.y),
            set = kv_head / (a.kv_heads / a.sets);
  const int64_t key = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (key >= a.selected.keys) return;
  const int64_t at = (key * a.kv_heads + kv_head) * kDepth + lane * kEach;
  float dk[kEach] = {}, dv[kEach] = {};
  bool any = p.begins || p.ends;
  if (!p.begins) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) dk[i] = p.dk_sum[at + i], dv[i] = p.dv_sum[at + i];
  }
  const int64_t word = key / 32;
  const unsigned bit = 1u << (key % 32);
  for (int tile0 = 0; tile0 < p.tiles; tile0 += 32) {
    const int64_t of_tile =
        (static_cast<int64_t>(set) * p.turn_tiles + min(tile0 + lane, p.tiles - 1)) * p.words + word;
    const unsigned members = tile0 + lane < p.tiles ? p.members[of_tile] : 0u;
    const int rank = p.before[of_tile] + __popc(members & (bit - 1));
    for (unsigned left = __ballot_sync(kFullWarp, (members & bit) != 0); left != 0; left &= left - 1) {
      const int from = __ffs(static_cast<int>(left)) - 1, row = __shfl_sync(kFullWarp, rank, from);
      const int64_t slot = static_cast<int64_t>(tile0 + from) * a.kv_heads + kv_head,
                    partial = (slot * p.rows + row) * kDepth + lane * kEach;
      any = true;
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        dk[i] += to_float(p.dk[partial + i]), dv[i] += to_float(p.dv[partial + i]);
    }
  }
  if (!any) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (p.ends)
      a.dk[at + i] = from_float<nv_bf16>(dk[i]), a.dv[at + i] = from_float<nv_bf16>(dv[i]);
    else
      p.dk_sum[at + i] = dk[i], p.dv_sum[at + i] = dv[i];
  }
}

template <int kDepth, int kRows>
void launch_turn(Context& ctx, const Backward& a, const Partials& p) {
  const auto tiles = static_cast<unsigned>(p.tiles), kv_heads = static_cast<unsigned>(a.kv_heads);
  launch(ctx, "sparse_union_ranks",
         {.grid = dim3(tiles, static_cast<unsigned>(a.sets)),
          .block = dim3(kThreads),
          .smem = static_cast<size_t>(p.words) * sizeof(unsigned)},
         sparse_union_ranks_kernel, a, p, kRows);
  launch(ctx, "sparse_partial",
         {.grid = dim3(tiles * kv_heads), .block = dim3(kThreads), .smem = PartialTile<kDepth, kRows>::kSmem},
         sparse_partial_kernel<kDepth, kRows>, a, p);
  launch(ctx, "sparse_sum_partials",
         {.grid = dim3(blocks_for(a.selected.keys, kThreads / 32), kv_heads), .block = dim3(kThreads)},
         sparse_sum_partials_kernel<kDepth>, a, p);
}

template <int kDepth>
void launch_turn(Context& ctx, const Backward& a, const Partials& p) {
  if (whole_tile_rows(a.group_bits) == 32)
    launch_turn<kDepth, 32>(ctx, a, p);
  else
    launch_turn<kDepth, 64>(ctx, a, p);
}

}  // namespace

bool few_select_a_key(const Selected& selected) {
  return 16 * selected.room * selected.block <= selected.queries;
}

void partial_key_gradients(Context& ctx, ScratchScope& scratch, const Backward& a, int64_t depth) {
  const int tokens = whole_tile_rows(a.group_bits) >> a.group_bits;
  const int64_t keys = a.selected.keys, most = tokens * a.selected.room * a.selected.block;
  const auto tiles = static_cast<int>(blocks_for(a.selected.queries, tokens));
  Partials p = {};
  p.rows = most < keys ? most : keys;
  p.words = static_cast<int>(blocks_for(keys, 32));
  const int64_t in_turn = kBufferFactor * keys / p.rows;
  p.turn_tiles = in_turn < tiles ? static_cast<int>(in_turn) : tiles;
  const bool sums = p.turn_tiles < tiles;
  const Tensor dk = scratch.alloc("partial dk", DType::bf16, {p.turn_tiles, a.kv_heads, p.rows, depth}),
               dv = scratch.alloc("partial dv", DType::bf16, {p.turn_tiles, a.kv_heads, p.rows, depth}),
               members = scratch.alloc("union members", DType::i32, {a.sets, p.turn_tiles, p.words}),
               before = scratch.alloc("union ranks", DType::i32, {a.sets, p.turn_tiles, p.words}),
               dk_sum = scratch.alloc("dk sum", DType::f32, {sums ? keys : 0, a.kv_heads, depth}),
               dv_sum = scratch.alloc("dv sum", DType::f32, {sums ? keys : 0, a.kv_heads, depth});
  if (ctx.dry_run) return;
  p.dk = device_data<nv_bf16>(dk), p.dv = device_data<nv_bf16>(dv);
  p.members = device_data<unsigned>(members), p.before = device_data<int>(before);
  p.dk_sum = device_data<float>(dk_sum), p.dv_sum = device_data<float>(dv_sum);
  for (p.first = 0; p.first < tiles; p.first += p.turn_tiles) {
    p.tiles = tiles - p.first < p.turn_tiles ? tiles - p.first : p.turn_tiles;
    p.begins = p.first == 0, p.ends = p.first + p.tiles == tiles;
    if (depth == 64)
      launch_turn<64>(ctx, a, p);
    else
      launch_turn<128>(ctx, a, p);
  }
}

}  // namespace sluice::cuda
