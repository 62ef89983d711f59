// Grouped matrix products for Hopper in bf16: TMA, an mbarrier ring, wgmma, warp-specialised persistent
// blocks. Not yet run on a GPU; times here are computed.
//
// Mapping: a tile of 128 x 256 per block, the contraction 64 elements (48 KB) at a time through four stages.
// Two consumer warpgroups multiply 64 rows each, m64n256k16, one step's products under way while the next
// step's are issued; the stores of a tile leave under the next one's first products.
//
// The producer warpgroup fills the stages. Weights, and rows that lie behind each other, come by TMA, from
// one thread. Gathered rows come by cp.async straight into the swizzled layout, 8 or 16 copies of 16 bytes
// per thread and step: a step takes the tensor cores about 1000 cycles, these copies less than 400 of the
// load unit, so gathering hides behind them, where permuting rows into memory first would read and write all
// of them once more (a tenth of the product's time at hidden size 2048 and 768 of an expert). The last,
// partial step of a group of backward_weight comes by cp.async too, with zeros behind the group's end: TMA
// would bring the next group's rows.
//
// What cp.async wrote is visible to wgmma when the thread that issued it has waited and fenced. A step is
// published two steps after it was issued, so that two are on their way.
//
// A block's first tile is that of its index, the others come from a counter: a block that waits for the
// multiprocessor, because a collective runs there, or that had long groups, takes fewer of them. The thread
// that issues copies fetches the next tile when it begins one, and hands it on in shared memory.
//
// backward_weight contracts over rows, along which neither operand is contiguous: wgmma takes both as they
// lie (Major::mn). TMA adds its sums to dw, or overwrites it, each element once: nothing depends on an order.
//
// Limits: the tensor cores, then L2, which is read once per 85 operations; were that too much, two blocks of
// a cluster could share the weights. Tiles and groups: grouped_linear_kernels.cuh.
#include "attention/hopper_common.cuh"
#include "common/tensor_map.h"
#include "common/wgmma.cuh"
#include "grouped_linear/kernels.cuh"

namespace sluice::cuda {
namespace {

constexpr int kRows = kGroupedTileRows, kColumns = 256, kDepth = 64, kStages = 4, kLag = 2;
constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
constexpr int kChunkBytes = 64 * 128;  // 64 rows of 64 elements
constexpr int kABytes = kRows * kDepth * 2, kBBytes = kColumns * kDepth * 2, kStageBytes = kABytes + kBBytes;
constexpr int kStagingBytes = 2 * kChunkBytes;  // where the output of a consumer leaves from
constexpr int kProducerRegisters = 104, kConsumerRegisters = 200;
static_assert(kRows == 64 * kConsumers);
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * kRegistersAtEntry);
// A consumer releases a stage only after it has issued the next step, which must have been published.
static_assert(kLag <= kStages - 2);

constexpr int kSlots = 2;  // tiles handed on and not yet read
struct Barriers {
  uint64_t full[kStages], empty[kStages];
  uint64_t tile_full[kSlots], tile_empty[kSlots];
  int tile[kSlots];
};
constexpr int kStaging = kStages * kStageBytes, kBarriers = kStaging + kConsumers * kStagingBytes;
constexpr int kSmemBytes = kBarriers + static_cast<int>(sizeof(Barriers));

/// By one thread: the tile that next_tile gives all warps in this turn.
DEVICE_INLINE void hand_on(Barriers* bar, unsigned turn, int tile) {
  const unsigned slot = turn % kSlots;
  mbarrier_wait(bar->tile_empty + slot, turn / kSlots % 2 ^ 1);
  bar->tile[slot] = tile;
  mbarrier_arrive(bar->tile_full + slot);
}
/// By a warp: the block's tile of this turn; -1 behind the last.
DEVICE_INLINE int next_tile(Barriers* bar, unsigned turn) {
  const unsigned slot = turn % kSlots;
  mbarrier_wait(bar->tile_full + slot, turn / kSlots % 2);
  const int tile = bar->tile[slot];
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(bar->tile_empty + slot);
  return uniform(tile);
}

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
  /// Warps that read each tile.
  static constexpr unsigned kReaders = 4 * kConsumers + (kCopies ? 4 : 0);

  const GroupedProduct& p;
  const TensorMap *map_a, *map_b;
  unsigned char* smem;
  Barriers* bar;
  Ring<kStages> ring = {}, published = {};
  int unpublished = 0;

  DEVICE_INLINE void publish() {
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(bar->full + published.stage);
    published.advance();
  }

  DEVICE_INLINE void publish_all() {
    cp_async_wait<0>();
    for (; unpublished > 0; --unpublished) publish();
  }

  /// By one thread: the TMA copies of a step.
  DEVICE_INLINE void load(const GroupedTile& t, int k, bool with_a, bool with_b) {
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
    if constexpr (kKind == GroupedKind::forward) {
      tma_load_3d(b, map_b, full, k, t.n0, t.group);
    } else {
      for (int c = 0; c < kColumns / 64; ++c) {
        if constexpr (kWeight)
          tma_load_2d(b + c * kChunkBytes, map_b, full, t.n0 + c * 64, k);
        else
          tma_load_3d(b + c * kChunkBytes, map_b, full, t.n0 + c * 64, k, t.group);
      }
    }
  }

  DEVICE_INLINE int take() const { return static_cast<int>(gridDim.x) + atomicAdd(p.counter, 1); }
  /// By one thread: the tile, or the next one taken that has something to sum or to overwrite; -1 behind the
  /// last.
  DEVICE_INLINE int with_steps(int tile) const {
    for (const int tiles = num_tiles<kKind, kColumns>(p); tile < tiles; tile = take()) {
      if constexpr (!kWeight) return tile;
      const GroupedTile t = locate<kKind, kColumns>(p, tile);
      if (p.overwrite || t.k0 < t.k_end) return tile;
    }
    return -1;
  }

  DEVICE_INLINE void run() {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const auto *a = static_cast<const nv_bf16*>(p.a), *b = static_cast<const nv_bf16*>(p.b);
    int following = 0;
    if (thread == 0) {  // the thread that hands tiles on
      following = with_steps(static_cast<int>(blockIdx.x));
      hand_on(bar, 0, following);
    }
    for (unsigned turn = 0;; ++turn) {
      const int tile = kCopies ? next_tile(bar, turn) : following;
      if (tile < 0) break;
      if (thread == 0) following = with_steps(take());
      const GroupedTile t = locate<kKind, kColumns>(p, tile);
      int rows_of_a[8];  // rows thread / 8 + 16 i of the tile
      if constexpr (kGather == Gather::a && !kWeight) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int row = t.m0 + thread / 8 + 16 * i;
          rows_of_a[i] = row < t.m_end ? p.a_index[row] : -1;
        }
      }
      // Where every tile has a step, the steps not yet published are those of two tiles at most. With more,
      // the consumers could wait for one of them, and this thread for the consumers to read a tile.
      if constexpr (kWeight)
        if (t.k0 >= t.k_end) publish_all();
      if (thread == 0) hand_on(bar, turn + 1, following);
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
    if constexpr (kCopies) publish_all();
  }
};

/// The threads of one consumer. Immediate ids: a register would make the compiler reserve all sixteen.
DEVICE_INLINE void sync_consumer(int consumer) {
  if (consumer == 0)
    named_barrier_sync<1>(128);
  else
    named_barrier_sync<2>(128);
}

template <GroupedKind kKind>
struct Consumer {
  static constexpr bool kWeight = kKind == GroupedKind::backward_weight;
  static constexpr Major kMajorA = kWeight ? Major::mn : Major::k;
  static constexpr Major kMajorB = kKind == GroupedKind::forward ? Major::k : Major::mn;
  /// Bytes from 16 elements of the contraction to the next: along a row, or 16 rows.
  static constexpr uint32_t kStepA = kWeight ? 16 * 128 : 32;
  static constexpr uint32_t kStepB = kKind == GroupedKind::forward ? 32 : 16 * 128;

  const GroupedProduct& p;
  const TensorMap* map_out;
  unsigned char *smem, *staging;
  Barriers* bar;
  int consumer;
  int buffer = 0;  // of staging, for bf16

  DEVICE_INLINE int thread() const { return static_cast<int>(threadIdx.x) % 128; }

  /// bf16 rows, 64 columns at a time from two buffers in turns. Where a group ends within the 64 rows, they
  /// are stored row by row: behind it begins another's.
  DEVICE_INLINE void store(const GroupedTile& t, const float (&acc)[kColumns / 2]) {
    const int lane = thread() % 32, warp = thread() / 32, row0 = t.m0 + consumer * 64;
    const bool whole = row0 + 64 <= t.m_end;
#pragma unroll
    for (int c = 0; c < kColumns / 64; ++c) {
      const int column0 = t.n0 + c * 64;
      if (column0 < p.n) {
        unsigned char* from = staging + buffer * kChunkBytes;
        buffer ^= 1;
        if (whole)
          tma_store_wait_read<1>();
        else
          tma_store_wait_read<0>();
        sync_consumer(consumer);
#pragma unroll
        for (int q = 0; q < 4; ++q) {  // 16 columns
          uint32_t out[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            out[i] = pack_bf16(acc[c * 32 + q * 8 + 2 * i], acc[c * 32 + q * 8 + 2 * i + 1]);
          stmatrix_x4(smem_addr(from) + swizzled(warp * 16 + lane % 16, q * 2 + lane / 16), out);
        }
        if (whole) {
          fence_proxy_async();
          sync_consumer(consumer);
          if (thread() == 0) {
            tma_store_2d(map_out, from, column0, row0);
            tma_store_commit();
          }
        } else {
          sync_consumer(consumer);
          const int vector = thread() % 8, column = column0 + vector * 8;
          for (int row = thread() / 8; row0 + row < t.m_end && row < 64 && column < p.n; row += 16)
            store_vec<8>(static_cast<nv_bf16*>(p.out) + static_cast<int64_t>(row0 + row) * p.n + column,
                         *reinterpret_cast<const Vec16<nv_bf16>*>(from + swizzled(row, vector)));
        }
      }
    }
  }

  /// By one thread: 64 rows of 32 columns of f32 from shared memory.
  DEVICE_INLINE void send(const GroupedTile& t, const unsigned char* from, int column0) {
    const int row0 = t.m0 + consumer * 64;
    if (p.overwrite)
      tma_store_3d(map_out, from, column0, row0, t.group);
    else
      tma_add_3d(map_out, from, column0, row0, t.group);
    tma_store_commit();
  }

  /// f32 rows, 32 columns at a time from two buffers in turns, which TMA adds where they arrive. A thread has
  /// two neighbouring columns of each eight, and half a warp writes at once: where it wrote the same eight
  /// columns of four rows, two rows each would meet in the same banks. So odd rows are two eights ahead.
  DEVICE_INLINE void add(const GroupedTile& t, const float (&acc)[kColumns / 2]) {
    const int lane = thread() % 32, warp = thread() / 32;
    const bool odd = lane / 4 % 2;
    const int at = static_cast<int>(swizzled(warp * 16 + lane / 4, lane % 4 / 2 ^ (odd ? 4 : 0))) + lane % 2 * 8;
#pragma unroll
    for (int c = 0; c < kColumns / 32; ++c) {
      const int column0 = t.n0 + c * 32;
      if (column0 < p.n) {
        unsigned char* from = staging + buffer * kChunkBytes;
        buffer ^= 1;
        tma_store_wait_read<1>();
        sync_consumer(consumer);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int even_at = c * 16 + i * 4 + 2 * r, odd_at = c * 16 + (i ^ 2) * 4 + 2 * r;
            store_vec<2>(reinterpret_cast<float*>(from + (at ^ i * 32) + r * 8 * 128),
                         Vec<float, 2>{{odd ? acc[odd_at] : acc[even_at],
                                        odd ? acc[odd_at + 1] : acc[even_at + 1]}});
          }
        fence_proxy_async();
        sync_consumer(consumer);
        if (thread() == 0) send(t, from, column0);
      }
    }
  }

  /// The weight of a group without rows, to be overwritten: one buffer of zeros goes everywhere.
  DEVICE_INLINE void store_zeros(const GroupedTile& t) {
    tma_store_wait_read<0>();
    buffer = 1;  // the next one to be written
    sync_consumer(consumer);
    for (int i = thread() * 16; i < kChunkBytes; i += 128 * 16)
      store_vec<4>(reinterpret_cast<float*>(staging + i), Vec<float, 4>{});
    fence_proxy_async();
    sync_consumer(consumer);
    if (thread() != 0) return;
#pragma unroll 1
    for (int column0 = t.n0; column0 < min(t.n0 + kColumns, p.n); column0 += 32)
      send(t, staging, column0);
  }

  DEVICE_INLINE void run() {
    const bool releases = threadIdx.x % 32 == 0;
    const uint32_t a = smem_addr(smem) + consumer * kChunkBytes, b = smem_addr(smem) + kABytes;
    Ring<kStages> ring;
    float acc[kColumns / 2];
    unsigned turn = 0;
    GroupedTile next = {};
    int tile = next_tile(bar, turn++);
    if (tile >= 0) next = locate<kKind, kColumns>(p, tile);
    while (tile >= 0) {
      const GroupedTile t = next;
      tile = next_tile(bar, turn++);
      if (tile >= 0) next = locate<kKind, kColumns>(p, tile);  // arrives under the products
      const int steps = uniform((t.k_end - t.k0 + kDepth - 1) / kDepth);
      if constexpr (kWeight) {
        if (steps == 0) {
          store_zeros(t);
          continue;
        }
      }
      int before = 0;
      for (int step = 0; step < steps; ++step) {
        const uint32_t at = static_cast<uint32_t>(ring.stage * kStageBytes);
        mbarrier_wait(bar->full + ring.stage, ring.phase);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < kDepth / 16; ++kk)
          wgmma_ss<kMajorA, kMajorB>(
              acc, smem_descriptor(a + at + kk * kStepA),
              smem_descriptor(b + at + kk * kStepB, kMajorB == Major::k ? 16 : kChunkBytes),
              step > 0 || kk > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0 && releases) mbarrier_arrive(bar->empty + before);
        before = ring.stage;
        ring.advance();
      }
      wgmma_wait<0>();
      hold_registers(acc);
      if (releases) mbarrier_arrive(bar->empty + before);
      if constexpr (kWeight)
        add(t, acc);
      else
        store(t, acc);
    }
    tma_store_wait_read<0>();
  }
};

template <GroupedKind kKind, Gather kGather>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_linear_hopper_kernel(const GroupedProduct p, const __grid_constant__ TensorMap map_a,
                                 const __grid_constant__ TensorMap map_b,
                                 const __grid_constant__ TensorMap map_out) {
  using Loads = Producer<kKind, kGather>;
  DYN_SMEM(unsigned char, smem, 1024);
  auto* bar = reinterpret_cast<Barriers*>(smem + kBarriers);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(bar->full + s, Loads::kArrivals);
      mbarrier_init(bar->empty + s, 4 * kConsumers);
    }
    for (int s = 0; s < kSlots; ++s) {
      mbarrier_init(bar->tile_full + s, 1);
      mbarrier_init(bar->tile_empty + s, Loads::kReaders);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int group = uniform(static_cast<int>(threadIdx.x) / 128);
  if (group == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (Loads::kCopies || threadIdx.x == 0) Loads{p, &map_a, &map_b, smem, bar}.run();
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    unsigned char* staging = smem + kStaging + (group - 1) * kStagingBytes;
    Consumer<kKind>{p, &map_out, smem, staging, bar, group - 1}.run();
  }
}

template <GroupedKind kKind, Gather kGather>
void run(Context& ctx, const GroupedProduct& p) {
  constexpr bool kWeight = kKind == GroupedKind::backward_weight;
  TensorMap a = {}, b = {}, out = {};
  if (kGather != Gather::a)
    a = kWeight ? make_tensor_map_2d("dy of groups", p.a, p.a_rows, p.m, p.m, kDepth, 64)
                : make_tensor_map_2d("rows of groups", p.a, p.a_rows, p.k, p.k, kRows, kDepth);
  if (kKind == GroupedKind::forward)
    b = make_tensor_map_3d("weights of groups", p.b, p.groups, p.n, p.k, 1, kColumns, kDepth);
  else if (kKind == GroupedKind::backward_input)
    b = make_tensor_map_3d("weights of groups", p.b, p.groups, p.k, p.n, 1, kDepth, 64);
  else if (kGather != Gather::b)
    b = make_tensor_map_2d("x of groups", p.b, p.b_rows, p.n, p.n, kDepth, 64);
  if (kWeight)
    out = make_tensor_map_3d("gradient of weights of groups", p.out, p.groups, p.m, p.n, 1, 64, 32, MapElement::f32);
  else
    out = make_tensor_map_2d("products of groups", p.out, p.rows, p.n, p.n, 64, 64);
  const int64_t blocks = std::min<int64_t>(max_tiles<kKind>(p, kColumns), num_multiprocessors(ctx));
  const LaunchConfig config = {
      .grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads), .smem = kSmemBytes};
  launch(ctx, "grouped_linear_hopper", config, grouped_linear_hopper_kernel<kKind, kGather>, p, a, b, out);
}

}  // namespace

void grouped_linear_hopper(Context& ctx, GroupedKind kind, const GroupedProduct& p) {
  using enum GroupedKind;
  const bool gathers_a = p.a_index != nullptr;
  if (kind == forward)
    return gathers_a ? run<forward, Gather::a>(ctx, p) : run<forward, Gather::none>(ctx, p);
  if (kind == backward_input)
    return gathers_a ? run<backward_input, Gather::a>(ctx, p) : run<backward_input, Gather::none>(ctx, p);
  if (gathers_a) return run<backward_weight, Gather::a>(ctx, p);
  if (p.b_index) return run<backward_weight, Gather::b>(ctx, p);
  run<backward_weight, Gather::none>(ctx, p);
}

}  // namespace sluice::cuda
