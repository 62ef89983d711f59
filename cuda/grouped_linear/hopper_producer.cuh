#pragma once
// What fills the stages of grouped products on Hopper (hopper.cu): TMA and cp.async.
#include "common/wgmma.cuh"
#include "grouped_linear/hopper_pairs.cuh"

namespace sluice::cuda::grouped {

enum class Gather { none, a, b };

/// 64 rows of 64 kChunks columns by cp.async, as chunks side by side. Lane l of each warp knows which row of
/// the matrix is row l (rows[0]) and l + 32 (rows[1]) of the tile; -1: zeros.
template <int kChunks>
DEVICE_INLINE void copy_rows(uint32_t tile, const nv_bf16* matrix, int columns, int column0,
                             const int (&rows)[2]) {
  constexpr int kVectors = 8 * kChunks, kStep = 128 / kVectors;
  const int thread = static_cast<int>(threadIdx.x), vector = thread % kVectors, first = thread / kVectors;
  const int column = column0 + vector * 8;
  tile += static_cast<uint32_t>(vector / 8 * kChunkBytes);
#pragma unroll
  for (int i = 0; i < 64 / kStep; ++i) {
    const int row = first + i * kStep;
    const int from = __shfl_sync(kFullWarp, rows[i * kStep / 32], row % 32);
    const bool inside = from >= 0 && column < columns;
    cp_async_16(tile + swizzled(row, vector % 8),
                matrix + (inside ? static_cast<int64_t>(from) * columns + column : 0), inside);
  }
}

template <GroupedKind kKind, Gather kGather>
struct Producer {
  static constexpr bool kWeight = kKind == GroupedKind::backward_weight;
  /// Whether all four warps copy, or one thread issues TMA copies for everything.
  static constexpr bool kCopies = kWeight || kGather != Gather::none;
  /// Arrivals at a full barrier.
  static constexpr unsigned kArrivals = kCopies ? 5 : 1;
  /// Warps of both blocks that read each pair; one thread counts as such.
  static constexpr unsigned kReaders = kPair * (4 * kConsumers + (kCopies ? 4 : 1));
  /// b comes in parts, of which each block loads its half for both if they share it: 128 columns, or 64.
  static constexpr int kParts = kKind == GroupedKind::forward ? kPair : kColumns / 64;
  static constexpr int kPartColumns = kColumns / kParts, kPartBytes = kBBytes / kParts;

  const GroupedProduct& p;
  const TensorMap *map_a, *map_b;
  unsigned char* smem;
  Barriers* bar;
  Pairs<kKind> pairs;
  int rank;  // of the block in its cluster
  Ring<kStages> ring = {}, published = {};
  int unpublished = 0;

  DEVICE_INLINE void publish() {
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(bar->full + published.stage);
    published.advance();
  }

  /// By one thread: a part of b, for this block or for both.
  DEVICE_INLINE void load_part(const PairTile& t, int k, int part, unsigned char* to, uint64_t* full) {
    const int column = t.n0 + part * kPartColumns, x = kKind == GroupedKind::forward ? k : column,
              y = kKind == GroupedKind::forward ? column : k;
    constexpr unsigned kBoth = (1u << kPair) - 1;
    if constexpr (kWeight) {
      if (t.shares_b)
        tma_load_2d_multicast(to, map_b, full, x, y, kBoth);
      else
        tma_load_2d(to, map_b, full, x, y);
    } else {
      if (t.shares_b)
        tma_load_3d_multicast(to, map_b, full, x, y, t.group, kBoth);
      else
        tma_load_3d(to, map_b, full, x, y, t.group);
    }
  }

  /// By one thread: issues the TMA copies of a step. The barrier expects all of b, also the part that the
  /// other block multicasts.
  DEVICE_INLINE void load(const PairTile& t, int k, bool with_a, bool with_b) {
    unsigned char *a = smem + ring.stage * kStageBytes, *b = a + kABytes;
    uint64_t* full = bar->full + ring.stage;
    const unsigned bytes = (with_a ? kABytes : 0) + (with_b ? kBBytes : 0);
    if (bytes == 0) return mbarrier_arrive(full);
    mbarrier_arrive_expect_tx(full, bytes);
    if (with_a) {
      if constexpr (kWeight)
        for (int c = 0; c < kRows / 64; ++c) tma_load_2d(a + c * kChunkBytes, map_a, full, t.m0 + c * 64, k);
      else
        tma_load_2d(a, map_a, full, k, t.m0);
    }
    if (!with_b) return;
    const int first = t.shares_b ? rank * (kParts / static_cast<int>(kPair)) : 0;
    const int parts = t.shares_b ? kParts / static_cast<int>(kPair) : kParts;
#pragma unroll 1
    for (int part = first; part < first + parts; ++part) load_part(t, k, part, b + part * kPartBytes, full);
  }

  DEVICE_INLINE int take() const { return static_cast<int>(gridDim.x / kPair) + atomicAdd(p.counter, 1); }
  /// By one thread: the pair, or the next one taken that has something to sum; -1 behind the last. Every pair
  /// handed on has a step, so that the steps not yet published are those of two pairs at most: with more, the
  /// consumers could wait for one of them, and block 0 for the consumers to read a pair.
  DEVICE_INLINE int with_steps(int pair) const {
    for (; pair < pairs.count; pair = take()) {
      if constexpr (!kWeight) return pair;
      const PairTile t = pairs.locate(p, pair, rank);
      if (t.k0 < t.k_end) return pair;
    }
    return -1;
  }

  DEVICE_INLINE void run() {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const auto *a = static_cast<const nv_bf16*>(p.a), *b = static_cast<const nv_bf16*>(p.b);
    const bool hands_on = thread == 0 && rank == 0;
    int following = 0;
    if (hands_on) {
      following = with_steps(static_cast<int>(blockIdx.x / kPair));
      hand_on(bar, 0, following);
    }
    for (unsigned turn = 0;; ++turn) {
      const int pair = next_pair<!kCopies>(bar, turn);
      if (pair < 0) break;
      if (hands_on) following = with_steps(take());
      const PairTile t = pairs.locate(p, pair, rank);
      int rows_of_a[8];  // rows thread / 8 + 16 i of the tile
      if constexpr (kGather == Gather::a && !kWeight) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int row = t.m0 + thread / 8 + 16 * i;
          rows_of_a[i] = row < t.m_end ? p.a_index[row] : -1;
        }
      }
      if (hands_on) hand_on(bar, turn + 1, following);
      for (int k = t.k0; k < t.k_end; k += kDepth) {
        const bool partial = kWeight && k + kDepth > t.k_end;
        const bool load_a = kGather != Gather::a && !partial, load_b = kGather != Gather::b && !partial;
        [[maybe_unused]] int gathered[2], straight[2];  // loaded before the wait
        if constexpr (kWeight) {
          const int* index = kGather == Gather::a ? p.a_index : p.b_index;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int row = k + lane + 32 * i;
            straight[i] = row < t.k_end ? row : -1;
            gathered[i] = kGather != Gather::none && row < t.k_end ? index[row] : -1;
          }
        }
        mbarrier_wait(bar->empty + ring.stage, ring.phase ^ 1);
        if (thread == 0) load(t, k, load_a, load_b);
        if constexpr (kCopies) {
          const uint32_t to_a = smem_addr(smem) + ring.stage * kStageBytes, to_b = to_a + kABytes;
          if constexpr (kWeight) {
            if (!load_a)
              copy_rows<kRows / 64>(to_a, a, p.m, t.m0, kGather == Gather::a ? gathered : straight);
            if (!load_b)
              copy_rows<kColumns / 64>(to_b, b, p.n, t.n0, kGather == Gather::b ? gathered : straight);
          } else {
            const int column = k + thread % 8 * 8;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              const bool inside = rows_of_a[i] >= 0 && column < p.k;
              cp_async_16(to_a + swizzled(thread / 8 + 16 * i, thread % 8),
                          a + (inside ? static_cast<int64_t>(rows_of_a[i]) * p.k + column : 0), inside);
            }
          }
          cp_async_commit();
          if (unpublished == kLag) {
            cp_async_wait<kLag>();
            publish();
          } else {
            ++unpublished;
          }
        }
        ring.advance();
      }
    }
    if constexpr (kCopies) {
      cp_async_wait<0>();
      for (; unpublished > 0; --unpublished) publish();
    }
  }
};

}  // namespace sluice::cuda::grouped
