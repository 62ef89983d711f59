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
// Two blocks of a cluster compute two tiles of the same group and columns where they can (hopper_pairs.cuh):
// each loads half of b's tile into the shared memory of both, by multicast. A stage is filled again once the
// consumers of both have released it. Their bits are those of blocks that work alone.
//
// A cluster's first pair is that of its index, the others come from a counter: blocks that wait for their
// multiprocessors, because a collective runs there, or that had long groups, take fewer of them. The thread
// of the first block that issues copies fetches the next pair when it begins one, and hands it on to both.
//
// backward_weight contracts over rows, along which neither operand is contiguous: wgmma takes both as they
// lie (Major::mn). TMA adds its sums to dw, each element once: nothing depends on an order.
//
// Limits: the tensor cores, then L2, of which a byte is read per 128 operations (85 where b is not shared).
// Tiles and groups: kernels.cuh.
#include "common/tensor_map.h"
#include "grouped_linear/hopper_producer.cuh"

namespace sluice::cuda {
namespace {

using namespace grouped;

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
  Pairs<kKind> pairs;
  int rank;  // of the block in its cluster
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

  /// f32 rows, 32 columns at a time from two buffers in turns, which TMA adds where they arrive. A thread has
  /// two neighbouring columns of each eight, and half a warp writes at once: where it wrote the same eight
  /// columns of four rows, two rows each would meet in the same banks. So odd rows are two eights ahead.
  DEVICE_INLINE void add(const GroupedTile& t, const float (&acc)[kColumns / 2]) {
    const int lane = thread() % 32, warp = thread() / 32;
    const bool odd = lane / 4 % 2;
    const int at =
        static_cast<int>(swizzled(warp * 16 + lane / 4, lane % 4 / 2 ^ (odd ? 4 : 0))) + lane % 2 * 8;
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
            store_vec<2>(
                reinterpret_cast<float*>(from + (at ^ i * 32) + r * 8 * 128),
                Vec<float, 2>{{odd ? acc[odd_at] : acc[even_at], odd ? acc[odd_at + 1] : acc[even_at + 1]}});
          }
        fence_proxy_async();
        sync_consumer(consumer);
        if (thread() == 0) {
          tma_add_3d(map_out, from, column0, t.m0 + consumer * 64, t.group);
          tma_store_commit();
        }
      }
    }
  }

  DEVICE_INLINE void run() {
    const uint32_t others_empty = cluster_address(bar->empty, static_cast<unsigned>(rank) ^ 1);
    // The own arrival first: so none of the other block's next round can come before it.
    const auto release = [&](int stage) {
      if (threadIdx.x % 32 != 0) return;
      mbarrier_arrive(bar->empty + stage);
      mbarrier_arrive_cluster(others_empty + static_cast<uint32_t>(stage) * sizeof(uint64_t));
    };
    const uint32_t a = smem_addr(smem) + consumer * kChunkBytes, b = smem_addr(smem) + kABytes;
    Ring<kStages> ring;
    float acc[kColumns / 2];
    unsigned turn = 0;
    GroupedTile next = {};
    int pair = next_pair(bar, turn++);
    if (pair >= 0) next = pairs.locate(p, pair, rank);
    while (pair >= 0) {
      const GroupedTile t = next;
      pair = next_pair(bar, turn++);
      if (pair >= 0) next = pairs.locate(p, pair, rank);  // arrives under the products
      const int steps = uniform((t.k_end - t.k0 + kDepth - 1) / kDepth);
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
        if (step > 0) release(before);
        before = ring.stage;
        ring.advance();
      }
      wgmma_wait<0>();
      hold_registers(acc);
      release(before);
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
      mbarrier_init(bar->empty + s, kPair * 4 * kConsumers);
    }
    for (int s = 0; s < kSlots; ++s) {
      mbarrier_init(bar->pair_full + s, 1);
      mbarrier_init(bar->pair_empty + s, Loads::kReaders);
    }
    fence_mbarrier_init();
  }
  cluster_sync();
  const int rank = static_cast<int>(cluster_rank());
  const Pairs<kKind> pairs(p);
  const int group = uniform(static_cast<int>(threadIdx.x) / 128);
  if (group == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (Loads::kCopies || threadIdx.x == 0) Loads{p, &map_a, &map_b, smem, bar, pairs, rank}.run();
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    unsigned char* staging = smem + kStaging + (group - 1) * kStagingBytes;
    Consumer<kKind>{p, &map_out, smem, staging, bar, pairs, rank, group - 1}.run();
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive here
}

template <GroupedKind kKind, Gather kGather>
void run(Context& ctx, const GroupedProduct& p) {
  constexpr bool kWeight = kKind == GroupedKind::backward_weight;
  TensorMap a = {}, b = {}, out = {};
  if (kGather != Gather::a)
    a = kWeight ? make_tensor_map_2d("dy of groups", p.a, p.a_rows, p.m, p.m, kDepth, 64)
                : make_tensor_map_2d("rows of groups", p.a, p.a_rows, p.k, p.k, kRows, kDepth);
  if (kKind == GroupedKind::forward)
    b = make_tensor_map_3d("weights of groups", p.b, p.groups, p.n, p.k, 1, kColumns / kPair, kDepth);
  else if (kKind == GroupedKind::backward_input)
    b = make_tensor_map_3d("weights of groups", p.b, p.groups, p.k, p.n, 1, kDepth, 64);
  else if (kGather != Gather::b)
    b = make_tensor_map_2d("x of groups", p.b, p.b_rows, p.n, p.n, kDepth, 64);
  if (kWeight)
    out = make_tensor_map_3d("gradient of weights of groups", p.out, p.groups, p.m, p.n, 1, 64, 32,
                             MapElement::f32);
  else
    out = make_tensor_map_2d("products of groups", p.out, p.rows, p.n, p.n, 64, 64);
  // Multiprocessors of a GPU come in pairs, which clusters of two fill.
  const int64_t clusters =
      std::min<int64_t>(max_pairs<kKind>(p), std::max(num_multiprocessors(ctx) / static_cast<int>(kPair), 1));
  const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(clusters) * kPair),
                               .block = dim3(kThreads),
                               .smem = kSmemBytes,
                               .cluster = dim3(kPair)};
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
