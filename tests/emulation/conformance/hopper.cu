#include "common/tensor_map.h"
#include "common/wgmma.cuh"
#include "device.h"

namespace sluice::conformance {
namespace {

using namespace sluice::cuda;

// ---- stmatrix: fragments 4 lane + i into a tile of 16 rows and 16 columns

template <bool kTransposed>
__global__ void store_matrices(uint32_t* out) {
  DYN_SMEM(uint32_t, tile, 128);
  const unsigned lane = threadIdx.x;
  uint32_t r[4];
  for (unsigned i = 0; i < 4; ++i) r[i] = (8 * lane + 2 * i) | (8 * lane + 2 * i + 1) << 16;
  const uint32_t at = smem_addr(tile) + lane % 16 * 32 + lane / 16 * 16;
  if constexpr (kTransposed)
    stmatrix_x4_trans(at, r);
  else
    stmatrix_x4(at, r);
  __syncwarp();
  for (unsigned i = lane; i < 128; i += 32) out[i] = tile[i];
}

template <bool kTransposed>
Dump store_matrices_dump(const char* name) {
  const Words out(128);
  run(store_matrices<kTransposed>, 1, 32, 512, out.get());
  return {name, out.host()};
}

// ---- mbarrier: four phases, each ended by the arrivals of all threads

__global__ void phases(uint32_t* out) {
  STATIC_SMEM(uint64_t, barrier, [1]);
  STATIC_SMEM(uint32_t, turn, [1]);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, blockDim.x);
    fence_mbarrier_init();
    turn[0] = 7;
  }
  __syncthreads();
  for (unsigned phase = 0; phase < 4; ++phase) {
    if (threadIdx.x == phase * 32) turn[0] = turn[0] * 3 + phase;
    mbarrier_arrive(barrier);
    mbarrier_wait(barrier, phase & 1);
    out[phase * blockDim.x + threadIdx.x] = turn[0];
    __syncthreads();
  }
}

Dump phases_dump() {
  const Words out(4 * 128);
  run(phases, 1, 128, 0, out.get());
  return {"mbarrier", out.host()};
}

// ---- TMA

constexpr unsigned kBoxBytes = kBoxRows * kBoxColumns * 2,
                   kPlaneBoxBytes = 2 * kBoxPlaneRows * kBoxPlaneColumns * 2;

TensorMap matrix_map(const Words& tensor) {
  return make_tensor_map("tensor", tensor.get(),
                         {2, {kTensorColumns, kTensorRows}, {kTensorColumns}, {kBoxColumns, kBoxRows}});
}
TensorMap planes_map(const Words& tensor) {
  return make_tensor_map("tensor", tensor.get(),
                         {3,
                          {kPlaneColumns, kPlaneRows, kPlanes},
                          {kPlaneColumns, kPlaneColumns * kPlaneRows},
                          {kBoxPlaneColumns, kBoxPlaneRows, 2}});
}

template <int kRank>
__global__ void load_box(uint32_t* out, const __grid_constant__ TensorMap map, unsigned bytes) {
  DYN_SMEM(uint32_t, box, 1024);
  STATIC_SMEM(uint64_t, barrier, [1]);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    fence_proxy_async();
    mbarrier_arrive_expect_tx(barrier, bytes);
    if constexpr (kRank == 2)
      tma_load_2d(box, &map, barrier, kBoxX, kBoxY);
    else
      tma_load_3d(box, &map, barrier, 24, 8, 2);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  for (unsigned i = threadIdx.x; i < bytes / 4; i += blockDim.x) out[i] = box[i];
}

template <int kRank>
__global__ void store_box(const uint32_t* in, const __grid_constant__ TensorMap map, unsigned bytes) {
  DYN_SMEM(uint32_t, box, 1024);
  for (unsigned i = threadIdx.x; i < bytes / 4; i += blockDim.x) box[i] = in[i];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if constexpr (kRank == 2)
    tma_store_2d(&map, box, kBoxX, kBoxY);
  else
    tma_store_3d(&map, box, 24, 8, 2);
  tma_store_commit();
  tma_store_wait_read<0>();
  tma_store_wait<0>();
}

Dump load_2d_dump() {
  const Words tensor(moved_words(kTensorRows * kTensorColumns)), out(kBoxBytes / 4);
  run(load_box<2>, 1, 128, kBoxBytes, out.get(), matrix_map(tensor), kBoxBytes);
  return {"tma_load_2d", out.host()};
}
Dump load_3d_dump() {
  const Words tensor(moved_words(kPlanes * kPlaneRows * kPlaneColumns)), out(kPlaneBoxBytes / 4);
  run(load_box<3>, 1, 128, kPlaneBoxBytes, out.get(), planes_map(tensor), kPlaneBoxBytes);
  return {"tma_load_3d", out.host()};
}
Dump store_2d_dump() {
  const Words in(moved_words(kBoxBytes / 2)), tensor(kTensorRows * kTensorColumns / 2);
  run(store_box<2>, 1, 128, kBoxBytes, in.get(), matrix_map(tensor), kBoxBytes);
  return {"tma_store_2d", tensor.host()};
}
Dump store_3d_dump() {
  const Words in(moved_words(kPlaneBoxBytes / 2)), tensor(kPlanes * kPlaneRows * kPlaneColumns / 2);
  run(store_box<3>, 1, 128, kPlaneBoxBytes, in.get(), planes_map(tensor), kPlaneBoxBytes);
  return {"tma_store_3d", tensor.host()};
}

// ---- clusters of two blocks

/// Each block loads one of two boxes, side by side in shared memory, for both.
template <int kRank>
__global__ void load_box_for_both(uint32_t* out, const __grid_constant__ TensorMap map, unsigned bytes) {
  DYN_SMEM(uint32_t, boxes, 1024);
  STATIC_SMEM(uint64_t, barrier, [1]);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  const unsigned rank = cluster_rank();
  if (threadIdx.x == 0) {
    fence_proxy_async();
    mbarrier_arrive_expect_tx(barrier, 2 * bytes);
    const int x = rank == 0 ? (kRank == 2 ? kBoxX : 24) : 0;
    if constexpr (kRank == 2)
      tma_load_2d_multicast(boxes + rank * bytes / 4, &map, barrier, x, kBoxY, 3);
    else
      tma_load_3d_multicast(boxes + rank * bytes / 4, &map, barrier, x, 8, 2, 3);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  for (unsigned i = threadIdx.x; i < 2 * bytes / 4; i += blockDim.x) out[rank * 2 * bytes / 4 + i] = boxes[i];
  cluster_sync();
}

template <int kRank>
Dump load_for_both_dump() {
  constexpr unsigned kBytes = kRank == 2 ? kBoxBytes : kPlaneBoxBytes;
  const Words tensor(
      moved_words(kRank == 2 ? kTensorRows * kTensorColumns : kPlanes * kPlaneRows * kPlaneColumns)),
      out(kBytes);
  run_in_clusters(2, load_box_for_both<kRank>, 2, 128, 2 * kBytes, out.get(),
               kRank == 2 ? matrix_map(tensor) : planes_map(tensor), kBytes);
  return {kRank == 2 ? "tma_load_2d_multicast" : "tma_load_3d_multicast", out.host()};
}

/// Four turns, in which each block sends a number to the other, which lets it send the next one.
__global__ void send_to_other(uint32_t* out) {
  STATIC_SMEM(uint64_t, barriers, [2]);
  STATIC_SMEM(int, number, [1]);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) mbarrier_init(barriers + i, 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  const unsigned rank = cluster_rank(), other = rank ^ 1;
  for (unsigned turn = 0; turn < 4; ++turn) {
    if (threadIdx.x == 0) {
      mbarrier_wait(barriers + 1, (turn & 1) ^ 1);
      const uint32_t arrived = cluster_address(barriers, other);
      mbarrier_arrive_expect_tx_cluster(arrived, 4);
      store_async(cluster_address(number, other), static_cast<int>(100 * rank + turn), arrived);
    }
    __syncthreads();
    mbarrier_wait(barriers, turn & 1);
    out[(rank * 4 + turn) * blockDim.x + threadIdx.x] = static_cast<uint32_t>(number[0]);
    __syncthreads();
    if (threadIdx.x == 0) mbarrier_arrive_cluster(cluster_address(barriers + 1, other));
  }
  cluster_sync();
}

Dump send_dump() {
  const Words out(2 * 4 * 64);
  run_in_clusters(2, send_to_other, 2, 64, 0, out.get());
  return {"store_async, mbarrier_arrive_cluster", out.host()};
}

// ---- TMA of f32: a box is stored, then four blocks add to it

__global__ void store_or_add_floats(const __grid_constant__ TensorMap map, bool add) {
  DYN_SMEM(float, box, 1024);
  for (unsigned i = threadIdx.x; i < kPlaneBoxBytes / 2; i += blockDim.x)
    box[i] = static_cast<float>(i * (blockIdx.x + 1));
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (add)
    tma_add_3d(&map, box, 24, 8, 2);
  else
    tma_store_3d(&map, box, 24, 8, 2);
  tma_store_commit();
  tma_store_wait<0>();
}

Dump add_3d_dump() {
  const Words tensor(kPlanes * kPlaneRows * kPlaneColumns);
  const TensorMap map = make_tensor_map_3d("tensor", tensor.get(), kPlanes, kPlaneRows, kPlaneColumns, 2,
                                           kBoxPlaneRows, kBoxPlaneColumns, MapElement::f32);
  run(store_or_add_floats, 1, 128, 2 * kPlaneBoxBytes, map, false);
  run(store_or_add_floats, 4, 128, 2 * kPlaneBoxBytes, map, true);
  return {"tma_add_3d", tensor.host()};
}

// ---- bulk copies and additions: four blocks add to one row, the first also copies

__global__ void bulk(float* sum, float* copy) {
  DYN_SMEM(float, row, 128);
  row[threadIdx.x] = static_cast<float>(threadIdx.x * (blockIdx.x + 1));
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x != 0) return;
  bulk_reduce_add(sum, row, 512);
  if (blockIdx.x == 0) bulk_store(copy, row, 512);
  tma_store_commit();
  tma_store_wait<0>();
  fence_proxy_async_global();
}

Dump bulk_dump() {
  const Words out(std::vector<uint32_t>(256, 0));
  float* sum = reinterpret_cast<float*>(out.get());
  run(bulk, 4, 128, 512, sum, sum + 128);
  return {"bulk_reduce_add, bulk_store", out.host()};
}

// ---- clusters of four blocks: lane l of every block writes its numbers to block l, which then holds one of
// each

struct alignas(8) Pair {
  float a, b;
};
__global__ void exchange(float* out) {
  STATIC_SMEM(Pair, from, [4]);
  const unsigned rank = blockIdx.x % 4;
  cluster_sync();
  if (threadIdx.x < 4)
    store_to_block(from + rank, threadIdx.x, static_cast<float>(blockIdx.x), static_cast<float>(threadIdx.x));
  cluster_sync();
  if (threadIdx.x >= 4) return;
  out[(blockIdx.x * 4 + threadIdx.x) * 2] = from[threadIdx.x].a;
  out[(blockIdx.x * 4 + threadIdx.x) * 2 + 1] = from[threadIdx.x].b;
}

Dump exchange_dump() {
  const Words out(8 * 4 * 2);
  run_in_clusters(4, exchange, 8, 32, 0, reinterpret_cast<float*>(out.get()));
  return {"cluster_sync, store_to_block", out.host()};
}

// ---- one lane is elected; registers are redistributed

/// 512 threads have 128 registers each at the start. Half of them give most of theirs away, and the others
/// keep more words at a time than 128 registers hold: they are read before a barrier and added after it.
__global__ void __launch_bounds__(512, 1) elect_and_share(uint32_t* out, const volatile uint32_t* in) {
  constexpr int kHeld = 160;
  if (threadIdx.x < 256) {
    setmaxnreg_dec<24>();
    const bool mine = elect_one();
    out[threadIdx.x] = __popc(__ballot_sync(kFullWarp, mine));
  } else {
    setmaxnreg_inc<224>();
    uint32_t held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = in[i] ^ threadIdx.x;
    named_barrier_sync<1>(256);
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) sum = 3 * sum + held[i];
    out[threadIdx.x] = sum;
  }
}

Dump elect_dump() {
  std::vector<uint32_t> words(160);
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(i * i);
  const Words in(words), out(512);
  run(elect_and_share, 1, 512, 0, out.get(), static_cast<const volatile uint32_t*>(in.get()));
  return {"elect_one, setmaxnreg", out.host()};
}

// ---- wgmma: d (64, N) = a (64, 32) b (N, 32)^T in two steps, operands in either layout or a in registers

/// Element (mn, k) of an operand with `size` of mn, as TMA would have written it.
template <Major kMajor>
DEVICE_INLINE uint32_t place(int mn, int k) {
  if constexpr (kMajor == Major::k)
    return swizzled(mn, k / 8) + k % 8 * 2;
  else
    return mn / 64 * (kProductDepth * 128) + swizzled(k, mn % 64 / 8) + mn % 8 * 2;
}
template <Major kMajor>
constexpr uint32_t kStepBytes = kMajor == Major::k ? 32 : 16 * 128;

template <int N, Major kA, Major kB, bool kRegisters>
__global__ void __launch_bounds__(128) product(float* out) {
  DYN_SMEM(char, smem, 1024);
  char *const a = smem, *const b = smem + 8192;
  const int tid = static_cast<int>(threadIdx.x);
  for (int i = tid; i < 64 * kProductDepth; i += 128)
    *reinterpret_cast<nv_bf16*>(a + place<kA>(i / kProductDepth, i % kProductDepth)) =
        from_float<nv_bf16>(static_cast<float>(factor(i)));
  for (int i = tid; i < N * kProductDepth; i += 128)
    *reinterpret_cast<nv_bf16*>(b + place<kB>(i / kProductDepth, i % kProductDepth)) =
        from_float<nv_bf16>(static_cast<float>(other_factor(i)));
  fence_proxy_async();
  __syncthreads();

  const int lane = tid % 32, row = tid / 32 * 16 + lane / 4;
  uint32_t left[2][4];
  for (int step = 0; step < 2; ++step)
    for (int i = 0; i < 4; ++i) {
      const int at = (row + 8 * (i % 2)) * kProductDepth + step * 16 + 8 * (i / 2) + lane % 4 * 2;
      left[step][i] = pack_bf16(static_cast<float>(factor(at)), static_cast<float>(factor(at + 1)));
    }
  constexpr uint32_t kChunk = kProductDepth * 128;
  const uint64_t a0 = smem_descriptor(smem_addr(a), kChunk),
                 a1 = smem_descriptor(smem_addr(a) + kStepBytes<kA>, kChunk);
  const uint64_t b0 = smem_descriptor(smem_addr(b), kChunk),
                 b1 = smem_descriptor(smem_addr(b) + kStepBytes<kB>, kChunk);
  float d[N / 2];
  wgmma_fence();
  if constexpr (kRegisters) {
    wgmma_rs<kB>(d, left[0], b0, false);
    wgmma_rs<kB>(d, left[1], b1, true);
  } else {
    wgmma_ss<kA, kB>(d, a0, b0, false);
    wgmma_ss<kA, kB>(d, a1, b1, true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold_registers(d);
  hold_registers(left);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) out[tid * (N / 2) + i] = d[i];
}

template <int N, Major kA, Major kB, bool kRegisters>
Dump product_dump() {
  constexpr const char* kNames[] = {"k", "mn"};
  const Words out(64 * N);
  run(product<N, kA, kB, kRegisters>, 1, 128, 8192 + (N < 64 ? 64 : N) * 128,
      reinterpret_cast<float*>(out.get()));
  return {"wgmma_" + std::string(kRegisters ? "rs" : "ss") + " N=" + std::to_string(N) +
              " A=" + (kRegisters ? "registers" : kNames[static_cast<int>(kA)]) +
              " B=" + kNames[static_cast<int>(kB)],
          out.host()};
}

template <int N>
void add_products(std::vector<Dump>& dumps) {
  dumps.push_back(product_dump<N, Major::k, Major::k, false>());
  dumps.push_back(product_dump<N, Major::k, Major::mn, false>());
  dumps.push_back(product_dump<N, Major::mn, Major::k, false>());
  dumps.push_back(product_dump<N, Major::mn, Major::mn, false>());
  dumps.push_back(product_dump<N, Major::k, Major::k, true>());
  dumps.push_back(product_dump<N, Major::k, Major::mn, true>());
}

}  // namespace

std::vector<Dump> run_hopper() {
  std::vector<Dump> dumps = {store_matrices_dump<false>("stmatrix_x4"),
                             store_matrices_dump<true>("stmatrix_x4_trans"),
                             phases_dump(),
                             load_2d_dump(),
                             load_3d_dump(),
                             store_2d_dump(),
                             store_3d_dump(),
                             add_3d_dump(),
                             load_for_both_dump<2>(),
                             load_for_both_dump<3>(),
                             send_dump(),
                             bulk_dump(),
                             exchange_dump(),
                             elect_dump()};
  add_products<32>(dumps);
  add_products<64>(dumps);
  add_products<128>(dumps);
  add_products<192>(dumps);
  add_products<256>(dumps);
  return dumps;
}

}  // namespace sluice::conformance
