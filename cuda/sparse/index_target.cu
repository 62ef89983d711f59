// Attention's mean over heads on the blocks that an indexer is trained on, on mma.sync in bf16: a block owns
// the tile of rows that forward has, with one key/value head after the other, and goes through the union of
// the selected keys or, in the dense warm-up, a range of all keys. Weights of a query's heads are added in
// shared memory, in a fixed order, and then written to the place of the key's block among those of the query.
// Not yet run on a GPU.
#include "sparse/attention.h"
#include "sparse/index_target.h"
#include "sparse/tiles.cuh"

namespace sluice::cuda {
namespace {

constexpr int kTileKeys = 64, kRangeTiles = 8;

struct Target {
  const nv_bf16 *q, *k;
  const float* lse;
  const int* targets;
  float* out;  // (queries of the chunk, G, row)
  Selected selected;
  int64_t t0, count, row;
  int heads, kv_heads, sets, group_bits, ranges;
  bool all;  // of the candidates; otherwise those of the selection
  float scale;

  /// The number of scored blocks of query t.
  DEVICE_INLINE int scored(int set, int64_t t) const {
    const int block = selected.block;
    if (!all) return selected.count[set * selected.queries + t] - (block > 1);
    const int before = selected.last(t) - selected.first_key[t];
    return block == 1 ? before + 1 : before / block;
  }
};

/// The visible keys of [begin, end) as one list, with the interface of KeyUnion.
template <int kThreads>
class KeyRange {
 public:
  struct Shared {
    int keys[kRangeTiles * kTileKeys];
    unsigned members[kRangeTiles * kTileKeys];
  };
  DEVICE_INLINE KeyRange(Shared& shared, const Selected& selected, int64_t t0, int tokens, int begin, int end)
      : s_(shared), p_(selected), t0_(t0), tokens_(tokens), next_(begin), end_(end) {}
  DEVICE_INLINE int list() {
    __syncthreads();  // the last list has been read
    count_ = max(min(end_ - next_, kRangeTiles * kTileKeys), 0);
    for (int i = static_cast<int>(threadIdx.x); i < count_; i += kThreads) {
      unsigned members = 0;
      for (int t = 0; t < tokens_; ++t)
        if (next_ + i >= p_.first_key[t0_ + t] && next_ + i <= p_.last(t0_ + t)) members |= 1u << t;
      s_.keys[i] = next_ + i, s_.members[i] = members;
    }
    next_ += count_;
    __syncthreads();
    return (count_ + kTileKeys - 1) / kTileKeys;
  }
  DEVICE_INLINE const int* keys(int j) const { return s_.keys + j * kTileKeys; }
  DEVICE_INLINE int valid(int j) const { return min(kTileKeys, count_ - j * kTileKeys); }
  DEVICE_INLINE unsigned members(int j, int i) const {
    return i < valid(j) ? s_.members[j * kTileKeys + i] : 0u;
  }

 private:
  Shared& s_;
  const Selected& p_;
  int64_t t0_;
  int tokens_, next_, end_, count_ = 0;
};

template <int kDepth, int kRows>
struct TargetTile {
  static constexpr int kThreads = 2 * kRows, kRowBytes = 2 * kDepth;
  static constexpr int kStride = kTileKeys + 4;  // floats: rows begin in different banks
  union Lists {
    typename KeyUnion<kThreads, kTileKeys>::Shared selected;
    typename KeyRange<kThreads>::Shared all;
  };
  struct Sums {
    float weights[kRows * kStride];          // of every row
    float means[32 * kTileKeys];             // of every query
    unsigned members[32][2], begins[32][2];  // of a query, bit per key; keys with which a block begins
    int before[32];                          // blocks that began before the tile
    int scored[32];
  };
  static constexpr int kK = kRows * kRowBytes, kSums = kK + kTileKeys * kRowBytes,
                       kList = (kSums + static_cast<int>(sizeof(Sums)) + 15) / 16 * 16;
  static constexpr size_t kSmem = kList + sizeof(Lists);
};

/// The keys of `list`, for the tile of queries that `of` describes for the first key/value head.
template <int kDepth, int kRows, class Keys>
DEVICE_INLINE void write_targets(const Target& a, unsigned char* smem, Keys& list, TileRows of, int set) {
  using S = TargetTile<kDepth, kRows>;
  constexpr int kThreads = S::kThreads;
  const uint32_t q_tile = smem_addr(smem), k_tile = q_tile + S::kK;
  auto& sums = *reinterpret_cast<typename S::Sums*>(smem + S::kSums);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32,
            group = 1 << a.group_bits, tokens = of.rows >> a.group_bits, per_set = a.kv_heads / a.sets,
            row0 = warp * 16 + (lane >> 2);  // this lane's rows are row0 and row0 + 8
  const uint32_t q_lane = q_tile + swizzled<kDepth>(warp * 16 + fragment_row(lane), fragment_chunk(lane)),
                 k_lane = k_tile + swizzled<kDepth>(fragment_row_t(lane), fragment_chunk_t(lane));
  const int64_t stride = static_cast<int64_t>(a.kv_heads) * kDepth;
  const float scale = a.scale * kLog2e, share = 1.0f / static_cast<float>(per_set * group);
  const int head0 = of.head0;

  for (int tiles = list.list(); tiles > 0; tiles = list.list())
    for (int j = 0; j < tiles; ++j) {
      for (int g = 0; g < per_set; ++g) {
        of.head0 = head0 + g * group;
        const int64_t kv_head = set * per_set + g;
        load_tile_rows_async<kRows, kDepth, kThreads>(q_tile, a.q, of);
        gather_rows_async<kTileKeys, kDepth, kThreads>(k_tile, a.k + kv_head * kDepth, stride, list.keys(j),
                                                       list.valid(j));
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        float s[kTileKeys / 8][4] = {};
        multiply_rows<kDepth>(s, q_lane, k_lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int r = row0 + 8 * i, token = r >> a.group_bits;
          const float lse = a.lse[of.statistic(min(r, of.rows - 1))] * kLog2e;
#pragma unroll
          for (int n = 0; n < kTileKeys / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int column = 8 * n + 2 * (lane & 3) + e;
              const bool member = r < of.rows && list.members(j, column) >> token & 1;
              sums.weights[r * S::kStride + column] = member ? ex2(s[n][2 * i + e] * scale - lse) : 0.0f;
            }
        }
        __syncthreads();  // and Q and K have been read
        for (int i = thread; i < tokens * kTileKeys; i += kThreads) {
          const float* const of_token = sums.weights + (i / kTileKeys << a.group_bits) * S::kStride;
          float sum = g == 0 ? 0.0f : sums.means[i];
          for (int h = 0; h < group; ++h) sum += of_token[h * S::kStride + i % kTileKeys];
          sums.means[i] = sum;
        }
      }
      // Which keys a query has, and where its blocks begin.
      for (int i = warp; i < tokens; i += kThreads / 32)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = 32 * half + lane;
          const bool member = list.members(j, column) >> i & 1;
          const bool begin =
              member && (list.keys(j)[column] - a.selected.first_key[of.t0 + i]) % a.selected.block == 0;
          const unsigned members = __ballot_sync(kFullWarp, member), begins = __ballot_sync(kFullWarp, begin);
          if (lane == 0) sums.members[i][half] = members, sums.begins[i][half] = begins;
        }
      __syncthreads();
      for (int i = thread; i < tokens * kTileKeys; i += kThreads) {
        const int token = i / kTileKeys, column = i % kTileKeys;
        const auto has = [&](const unsigned(&mask)[2], int c) { return (mask[c / 32] >> (c % 32) & 1) != 0; };
        const auto &members = sums.members[token], &begins = sums.begins[token];
        const bool begin = has(begins, column);
        // A block begins, or goes on from the tile before.
        if (!has(members, column) || !(begin || column == 0 || !has(members, column - 1))) continue;
        const unsigned upto = ~0u >> (31 - column % 32);
        const int e = sums.before[token] - 1 +
                      (column < 32 ? __popc(begins[0] & upto) : __popc(begins[0]) + __popc(begins[1] & upto));
        if (e >= sums.scored[token]) continue;
        float sum = sums.means[i];
        for (int c = column + 1; c < kTileKeys && has(members, c) && !has(begins, c); ++c)
          sum += sums.means[token * kTileKeys + c];
        float& to = a.out[((of.t0 + token - a.t0) * a.sets + set) * a.row + e];
        to = (begin ? 0.0f : to) + sum * share;
      }
      __syncthreads();
      if (thread < tokens)
        sums.before[thread] += __popc(sums.begins[thread][0]) + __popc(sums.begins[thread][1]);
    }
}

/// Grid (tiles of queries, G, ranges of keys).
template <int kDepth, int kRows>
__global__ void __launch_bounds__(2 * kRows) sparse_index_target_kernel(Target a) {
  using S = TargetTile<kDepth, kRows>;
  constexpr int kThreads = S::kThreads;
  DYN_SMEM(unsigned char, smem, 1024);
  auto& sums = *reinterpret_cast<typename S::Sums*>(smem + S::kSums);
  auto& lists = *reinterpret_cast<typename S::Lists*>(smem + S::kList);
  const int thread = static_cast<int>(threadIdx.x), set = static_cast<int>(blockIdx.y),
            tile_tokens = kRows >> a.group_bits;
  const int64_t t0 = a.t0 + static_cast<int64_t>(blockIdx.x) * tile_tokens, left = a.t0 + a.count - t0;
  const int tokens = left < tile_tokens ? static_cast<int>(left) : tile_tokens,
            head0 = set * (a.heads / a.sets);
  const TileRows of = {t0, a.selected.queries, tokens << a.group_bits, head0, a.heads, a.group_bits};
  bool counted = false;
  for (int i = 0; i < tokens; ++i) counted = counted || a.targets[t0 + i] >= 0;
  const int first = a.selected.first_key[t0], end = a.selected.last(t0 + tokens - 1) + 1;
  int begin = first;
  if (a.all && a.ranges > 1) begin += static_cast<int>(blockIdx.z) * kRangeTiles * kTileKeys;
  if (!counted || begin >= end) return;  // the whole block
  if (thread < tokens) {
    // Of all keys, those before the range have begun blocks of one.
    const int own_first = a.selected.first_key[t0 + thread];
    sums.before[thread] = a.all ? max(begin - own_first, 0) : 0;
    sums.scored[thread] = a.scored(set, t0 + thread);
  }
  if (a.all) {
    const int stop = a.ranges > 1 ? min(begin + kRangeTiles * kTileKeys, end) : end;
    KeyRange<kThreads> list(lists.all, a.selected, t0, tokens, begin, stop);
    write_targets<kDepth, kRows>(a, smem, list, of, set);
  } else {
    KeyUnion<kThreads, kTileKeys> list(lists.selected, a.selected, set, t0, tokens);
    write_targets<kDepth, kRows>(a, smem, list, of, set);
  }
}

template <int kDepth, int kRows>
void launch_targets(Context& ctx, const Target& a) {
  launch(ctx, "sparse_index_target",
         {.grid = dim3(blocks_for(a.count, kRows >> a.group_bits), static_cast<unsigned>(a.sets),
                       static_cast<unsigned>(a.ranges)),
          .block = dim3(2 * kRows),
          .smem = TargetTile<kDepth, kRows>::kSmem},
         sparse_index_target_kernel<kDepth, kRows>, a);
}

template <int kDepth>
void launch_targets(Context& ctx, const Target& a) {
  if (whole_tile_rows(a.group_bits) == 32)
    launch_targets<kDepth, 32>(ctx, a);
  else
    launch_targets<kDepth, 64>(ctx, a);
}

}  // namespace

bool target_on_tensor_cores(const IndexTarget& target) {
  AttentionInputs in;
  in.q = target.q, in.k = in.v = target.k;
  return sparse_tensor_cores(in);
}

void attention_targets(Context& ctx, float* out, int64_t row, int64_t t0, int64_t count,
                       const IndexInputs& in, const VisibleKeys& visible, const IndexTarget& target,
                       const Selection* selection) {
  Target a = {};
  a.q = device_data<nv_bf16>(target.q), a.k = device_data<nv_bf16>(target.k);
  a.lse = device_data<float>(target.lse), a.targets = device_data<int>(target.targets);
  a.out = out, a.row = row, a.t0 = t0, a.count = count;
  a.heads = static_cast<int>(target.q.dim(1)), a.kv_heads = static_cast<int>(target.k.dim(1));
  a.sets = static_cast<int>(in.sets), a.scale = static_cast<float>(target.scale);
  a.group_bits = group_bits_of(a.heads, a.kv_heads);
  a.all = selection == nullptr;
  a.selected.first_key = visible.first, a.selected.own = visible.own;
  a.selected.queries = target.q.dim(0), a.selected.keys = target.k.dim(0);
  a.selected.block = static_cast<int>(in.block);
  if (selection) {
    a.selected.first = device_data<int>(selection->first),
    a.selected.count = device_data<int>(selection->count);
    a.selected.room = selection->first.dim(2);
  }
  // Blocks of several keys may reach from one range into the next. Of queries of any place only the device
  // knows the last key.
  const int64_t end = in.own_key ? a.selected.keys : t0 + count + a.selected.keys - a.selected.queries;
  a.ranges = a.all && in.block == 1 ? static_cast<int>(blocks_for(end, kRangeTiles * kTileKeys)) : 1;
  if (target.q.dim(2) == 64)
    launch_targets<64>(ctx, a);
  else
    launch_targets<128>(ctx, a);
}

}  // namespace sluice::cuda
