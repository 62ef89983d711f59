// The plan is a stable counting sort in three kernels, without atomics in global memory and without reads by
// the host:
//   1. a block counts the experts of its contiguous slots;
//   2. counts of blocks become sums over the preceding blocks, expert by expert;
//   3. a block places its slots after smaller experts, and after the same expert in earlier blocks, earlier
//      warps, earlier rounds of its warp, and lower lanes.
// About 30 bytes per slot, bound by the latency of the three kernels up to a few hundred thousand slots.
// Combining is memory-bound: K + 1 rows of a token move once, 16 bytes per thread, up to eight rows in flight
// each. Not yet run on a GPU.
#include "common/map.cuh"
#include "core/kinds.h"
#include "ops/permute.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kPerThread = static_cast<int>(kMaxExperts) / kThreads;  // experts of a thread
constexpr int kScanColumns = 32, kScanRows = 32;

struct Plan {
  int *offsets, *slots, *tokens, *rows;
  const int* experts;
  int *counts, *totals;  // (blocks, E), (E)
  int num_slots, num_experts, blocks;
  int warp_slots;  // contiguous slots of a warp, a multiple of 32; of a block: 8 times that
  Divider per_token;

  /// No id leads out of the arrays.
  DEVICE_INLINE int expert(int slot) const { return min(max(experts[slot], 0), num_experts - 1); }
};

__global__ void __launch_bounds__(kThreads) count_experts_kernel(Plan p) {
  STATIC_SMEM(int, counts, [kMaxExperts]);
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * p.warp_slots * kWarps,
                last = begin + static_cast<int64_t>(p.warp_slots) * kWarps;
  const int64_t end = last < p.num_slots ? last : p.num_slots;
#pragma unroll 4
  for (int64_t slot = begin + threadIdx.x; slot < end; slot += kThreads)
    atomicAdd(&counts[p.expert(static_cast<int>(slot))], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads)
    p.counts[static_cast<int64_t>(blockIdx.x) * p.num_experts + e] = counts[e];
}

/// A block takes 32 experts, its thread (x, y) a contiguous part of the blocks' counts of expert x.
__global__ void __launch_bounds__(kScanColumns* kScanRows) scan_blocks_kernel(Plan p) {
  STATIC_SMEM(int, parts, [kScanRows][kScanColumns]);
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const int e = static_cast<int>(blockIdx.x) * kScanColumns + x,
            share = (p.blocks + kScanRows - 1) / kScanRows;
  const int begin = y * share, end = e < p.num_experts ? min(begin + share, p.blocks) : begin;
  int sum = 0;
#pragma unroll 4
  for (int b = begin; b < end; ++b) sum += p.counts[static_cast<int64_t>(b) * p.num_experts + e];
  parts[y][x] = sum;
  __syncthreads();
  int before = 0;
  for (int i = 0; i < y; ++i) before += parts[i][x];
  if (y == kScanRows - 1 && e < p.num_experts) p.totals[e] = before + sum;
#pragma unroll 4
  for (int b = begin; b < end; ++b) {
    int& count = p.counts[static_cast<int64_t>(b) * p.num_experts + e];
    const int n = count;
    count = before;
    before += n;
  }
}

/// Dynamic shared memory: 9 E integers.
__global__ void __launch_bounds__(kThreads) place_slots_kernel(Plan p) {
  DYN_SMEM(int, places, 16);  // (warps, E): counts of a warp, then where its next slot of an expert goes
  STATIC_SMEM(int, warp_totals, [kWarps]);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, E = p.num_experts;
  int* const begins = places + kWarps * E;  // of the experts' rows
  for (int i = thread; i < kWarps * E; i += kThreads) places[i] = 0;

  // Experts' totals to offsets: a thread takes neighbours.
  int before[kPerThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int e = thread * kPerThread + i;
    before[i] = sum;
    sum += e < E ? p.totals[e] : 0;
  }
  int through = sum;  // inclusive over lanes
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int lower = __shfl_up_sync(kFullWarp, through, offset);
    if (lane >= offset) through += lower;
  }
  if (lane == 31) warp_totals[warp] = through;
  __syncthreads();
  int start = through - sum;
  for (int w = 0; w < warp; ++w) start += warp_totals[w];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int e = thread * kPerThread + i;
    if (e < E) {
      begins[e] = start + before[i];
      if (blockIdx.x == 0) p.offsets[e] = start + before[i];
    }
  }
  if (blockIdx.x == 0 && thread == 0) p.offsets[E] = p.num_slots;

  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * p.warp_slots;
  const int64_t last = first + p.warp_slots < p.num_slots ? first + p.warp_slots : p.num_slots;
  int* const mine = places + warp * E;
#pragma unroll 4
  for (int64_t slot = first + lane; slot < last; slot += 32)
    atomicAdd(&mine[p.expert(static_cast<int>(slot))], 1);
  __syncthreads();
  for (int e = thread; e < E; e += kThreads) {
    int next = begins[e] + p.counts[static_cast<int64_t>(blockIdx.x) * E + e];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int n = places[w * E + e];
      places[w * E + e] = next;
      next += n;
    }
  }
  __syncthreads();
  for (int64_t round = first; round < last; round += 32) {
    const int slot = static_cast<int>(round) + lane;
    const bool is_slot = round + lane < last;
    const int e = is_slot ? p.expert(slot) : E;
    const unsigned peers = __match_any_sync(kFullWarp, e);
    const int lower = __popc(peers & ((1u << lane) - 1));
    const int row = (is_slot ? mine[e] : 0) + lower;
    __syncwarp();
    if (is_slot) {
      if (lower == 0) mine[e] = row + __popc(peers);
      p.slots[row] = slot;
      p.tokens[row] = static_cast<int>(p.per_token.quotient(slot));
      p.rows[slot] = row;
    }
    __syncwarp();
  }
}

template <class T>
struct Unpermute {
  T* y;
  const T* x;
  const int* rows;
  int64_t width, vectors;  // of all y
  int per_token;
  bool add;
  Divider row;  // of a vector of y
};

/// kCount rows are loaded before the first is added.
template <int kCount, int kN, class T>
DEVICE_INLINE void add_rows(float (&sum)[kN], const T* column, const int*& rows, int64_t width) {
  Vec<T, kN> v[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) v[k] = load_vec<kN>(column + rows[k] * width);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int e = 0; e < kN; ++e) sum[e] += to_float(v[k].v[e]);
  }
  rows += kCount;
}

/// A thread takes one vector of y.
template <class T, int kN>
__global__ void __launch_bounds__(kThreads, 4) unpermute_kernel(Unpermute<T> p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.vectors) return;
  const int64_t t = p.row.quotient(i);
  const T* const column = p.x + (i * kN - t * p.width);
  const int* rows = p.rows + t * p.per_token;
  Vec<T, kN> old, out;
  if (p.add) old = load_vec<kN>(p.y + i * kN);
  float sum[kN] = {};
  int left = p.per_token;
  for (; left >= 8; left -= 8) add_rows<8>(sum, column, rows, p.width);
  if (left & 4) add_rows<4>(sum, column, rows, p.width);
  if (left & 2) add_rows<2>(sum, column, rows, p.width);
  if (left & 1) add_rows<1>(sum, column, rows, p.width);
#pragma unroll
  for (int e = 0; e < kN; ++e) out.v[e] = from_float<T>(p.add ? to_float(old.v[e]) + sum[e] : sum[e]);
  store_vec<kN>(p.y + i * kN, out);
}

}  // namespace

void permute_plan(Context& ctx, const Permutation& permutation, const Tensor& experts) {
  const int64_t num_experts = permutation.offsets.dim(0) - 1, num_slots = experts.numel();
  SLUICE_CHECK(num_experts <= kMaxExperts, "permute_plan: {} experts; at most {}", num_experts, kMaxExperts);
  // Four rounds of a warp, more where that would be over 1024 blocks.
  constexpr int64_t kSlots = 4 * kThreads, kBlocks = 1024;
  const int64_t rounds =
      std::max<int64_t>((num_slots + kBlocks * kThreads - 1) / (kBlocks * kThreads), kSlots / kThreads);
  const int64_t blocks = std::max<int64_t>((num_slots + rounds * kThreads - 1) / (rounds * kThreads), 1);
  ScratchScope scratch(ctx.scratch);
  const Tensor counts = scratch.alloc("permutation_counts", DType::i32, {blocks, num_experts});
  const Tensor totals = scratch.alloc("permutation_totals", DType::i32, {num_experts});
  if (ctx.dry_run) return;
  const Plan p = {device_data<int>(permutation.offsets),
                  device_data<int>(permutation.slots),
                  device_data<int>(permutation.tokens),
                  device_data<int>(permutation.rows),
                  device_data<int>(experts),
                  device_data<int>(counts),
                  device_data<int>(totals),
                  static_cast<int>(num_slots),
                  static_cast<int>(num_experts),
                  static_cast<int>(blocks),
                  static_cast<int>(rounds * 32),
                  Divider(std::max<int64_t>(experts.dim(1), 1))};
  const dim3 grid(static_cast<unsigned>(blocks)), block(kThreads);
  launch(ctx, "permute_plan count", {.grid = grid, .block = block}, count_experts_kernel, p);
  launch(ctx, "permute_plan scan",
         {.grid = dim3(blocks_for(num_experts, kScanColumns)), .block = dim3(kScanColumns, kScanRows)},
         scan_blocks_kernel, p);
  const size_t smem = static_cast<size_t>((kWarps + 1) * num_experts) * sizeof(int);
  launch(ctx, "permute_plan place", {.grid = grid, .block = block, .smem = smem}, place_slots_kernel, p);
}

void unpermute(Context& ctx, Tensor y, const Tensor& x, const Tensor& rows, Into into) {
  if (ctx.dry_run) return;
  dispatch_storage("unpermute", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    constexpr int kN = kVecWidth<T>;
    const int64_t width = y.dim(1);
    if (y.numel() == 0) return;
    const bool vectors = width % kN == 0 && aligned(device_data<T>(y), device_data<T>(x));
    const int64_t n = vectors ? kN : 1;
    const Unpermute<T> p = {device_data<T>(y),      device_data<T>(x),
                            device_data<int>(rows), width,
                            y.numel() / n,          static_cast<int>(rows.dim(1)),
                            into == Into::add,      Divider(width / n)};
    launch(ctx, "unpermute", {.grid = dim3(blocks_for(p.vectors, kThreads)), .block = dim3(kThreads)},
           vectors ? unpermute_kernel<T, kN> : unpermute_kernel<T, 1>, p);
  });
}

namespace {

/// A unit of copying, of a row `width` units long. kPut: y[index[r]] = x[r], otherwise y[r] = x[index[r]].
template <class Unit, bool kPut>
struct MoveRows {
  static constexpr int kWidth = 1, kUnroll = 4;
  Unit* y;
  const Unit* x;
  const int* index;
  Divider row;
  int64_t width;
  template <int N>
  using In = Unit;
  DEVICE_INLINE int64_t indexed(int64_t i) const {
    const int64_t r = row.quotient(i);
    return index[r] * width + (i - r * width);
  }
  template <int N>
  DEVICE_INLINE Unit load(int64_t i) const {
    return x[kPut ? i : indexed(i)];
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const Unit& unit) const {
    y[kPut ? indexed(i) : i] = unit;
  }
};

template <class Unit, bool kPut>
void move_units(Context& ctx, const char* name, const Tensor& y, const Tensor& x, const Tensor& index) {
  const int64_t width = x.dim(1) * dtype_size(x.dtype) / static_cast<int64_t>(sizeof(Unit));
  map(ctx, name,
      MoveRows<Unit, kPut>{device_data<Unit>(y), device_data<Unit>(x), device_data<int>(index),
                           Divider(width), width},
      index.dim(0) * width, /*vectors=*/false);
}

template <bool kPut>
void move_rows(Context& ctx, const char* name, const Tensor& y, const Tensor& x, const Tensor& index) {
  if (ctx.dry_run || index.dim(0) == 0) return;
  const int64_t bytes = x.dim(1) * dtype_size(x.dtype);
  if (bytes % 16 == 0 && aligned(device_data<char>(y), device_data<char>(x)))
    move_units<uint4, kPut>(ctx, name, y, x, index);
  else if (bytes % 4 == 0 && dtype_size(x.dtype) >= 4)
    move_units<unsigned, kPut>(ctx, name, y, x, index);
  else
    move_units<unsigned short, kPut>(ctx, name, y, x, index);
}

struct MoveLast {
  static constexpr int kWidth = 1, kUnroll = 4;
  int* rows;
  int begin, count, behind;
  template <int N>
  using In = int;
  template <int N>
  DEVICE_INLINE int load(int64_t i) const {
    return rows[i];
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const int& row) const {
    rows[i] = row >= begin + count ? row - count : row >= begin ? row + behind : row;
  }
};

struct Number {
  static constexpr int kWidth = 1, kUnroll = 4;
  int* index;
  template <int N>
  struct In {};
  template <int N>
  DEVICE_INLINE In<N> load(int64_t) const {
    return {};
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>&) const {
    index[i] = static_cast<int>(i);
  }
};

}  // namespace

void take_rows(Context& ctx, Tensor y, const Tensor& x, const Tensor& index) {
  move_rows<false>(ctx, "take_rows", y, x, index);
}
void put_rows(Context& ctx, Tensor y, const Tensor& x, const Tensor& index) {
  move_rows<true>(ctx, "put_rows", y, x, index);
}

void move_rows_last(Context& ctx, Tensor rows, int64_t begin, int64_t count, int64_t end) {
  if (ctx.dry_run || count == 0) return;
  map(ctx, "move_rows_last",
      MoveLast{device_data<int>(rows), static_cast<int>(begin), static_cast<int>(count),
               static_cast<int>(end - begin - count)},
      rows.numel(),
      /*vectors=*/false);
}

void number_rows(Context& ctx, Tensor index) {
  if (!ctx.dry_run)
    map(ctx, "number_rows", Number{device_data<int>(index)}, index.numel(), /*vectors=*/false);
}

}  // namespace sluice::cuda
