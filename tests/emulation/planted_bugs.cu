#include <vector>

#include "common/wgmma.cuh"
#include "planted_bugs.h"
#include "support.h"

namespace sluice::cuda {
namespace {

// ---- sums of rows and their neighbours: block and warp reductions, vector loads

constexpr int kRowThreads = 128, kRow = 512;

template <Bug kBug>
DEVICE_INLINE float sum_over_block(float v) {
  constexpr int kWarps = kRowThreads / 32;
  STATIC_SMEM(float, partial, [kWarps]);
  v = warp_sum(v);
  if (kBug != Bug::missing_second_barrier) __syncthreads();  // the call before may still be reading
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32 + (kBug == Bug::shared_out_of_bounds)] = v;
  if (kBug != Bug::missing_barrier) __syncthreads();
  float total = 0;
  for (int w = 0; w < kWarps; ++w) total += partial[w];
  return total;
}

template <Bug kBug>
DEVICE_INLINE float* shared_row() {
  if constexpr (kBug == Bug::less_aligned_shared) {
    STATIC_SMEM(float, row, [kRowThreads]);
    return row;
  } else {
    STATIC_SMEM_16(float, row, [kRowThreads]);
    return row;
  }
}

/// out (rows, 2): the sum of a row of x, and of its squares after neighbours have been swapped.
template <Bug kBug>
__global__ void row_sums(float* out, const float* x) {
  float* const swapped = shared_row<kBug>();
  const float* row = x + static_cast<int64_t>(blockIdx.x) * kRow;
  const int shift = kBug == Bug::misaligned_vector ? 1 : kBug == Bug::global_out_of_bounds ? 4 : 0;
  const auto v = load_vec<4>(row + 4 * threadIdx.x + shift);
  const float sum = sum_over_block<kBug>(v.v[0] + v.v[1] + v.v[2] + v.v[3]);
  swapped[threadIdx.x] = v.v[0];
  if (kBug != Bug::missing_syncwarp) __syncwarp();
  const unsigned mirror = threadIdx.x ^ 31;
  const float other = load_vec<4>(swapped + mirror / 4 * 4).v[mirror % 4];
  const float squares = sum_over_block<kBug>(other * other);
  if (threadIdx.x == 0) out[2 * blockIdx.x] = sum, out[2 * blockIdx.x + 1] = squares;
}

template <Bug kBug>
bool row_sums_are_right() {
  constexpr int kRows = 3;
  std::vector<float> x(kRows * kRow);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7 % 11);
  const DeviceArray<float> device_x(x), out(2 * kRows);
  emu::launch(shape(kRows, kRowThreads, 0, "row_sums"), row_sums<kBug>, out.get(), device_x.get());
  const std::vector<float> result = out.host();
  bool right = true;
  for (int r = 0; r < kRows; ++r) {
    float sum = 0, squares = 0;
    for (int i = 0; i < kRow; ++i) sum += x[r * kRow + i];
    for (int i = 0; i < kRow; i += 4) squares += x[r * kRow + i] * x[r * kRow + i];
    right &= result[2 * r] == sum && result[2 * r + 1] == squares;
  }
  return right;
}

// ---- a stream through two stages of shared memory, filled with cp.async

constexpr int kStreamThreads = 64, kStreamSteps = 8;

/// out (threads): sums over the steps of what another thread has copied.
template <Bug kBug>
__global__ void stream_sums(float* out, const float* x) {
  DYN_SMEM(float, stages, 16);
  const int tid = static_cast<int>(threadIdx.x);
  const auto fill = [&](int step) {
    const uint32_t to = smem_addr(stages) + static_cast<uint32_t>((step % 2 * kStreamThreads + tid) * 16);
    if (step < kStreamSteps) cp_async_16(to, x + (step * kStreamThreads + tid) * 4, true);
    cp_async_commit();
  };
  fill(0);
  float sum = 0;
  for (int step = 0; step < kStreamSteps; ++step) {
    fill(step + 1);
    cp_async_wait<kBug == Bug::cp_async_wait_off_by_one ? 2 : 1>();
    __syncthreads();
    sum += stages[(step % 2 * kStreamThreads + (kStreamThreads - 1 - tid)) * 4];
    if (kBug != Bug::missing_refill_barrier) __syncthreads();
  }
  cp_async_wait<0>();
  out[tid] = sum;
}

template <Bug kBug>
bool stream_sums_are_right() {
  std::vector<float> x(kStreamSteps * kStreamThreads * 4);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 5 % 13);
  const DeviceArray<float> device_x(x), out(kStreamThreads);
  emu::launch(shape(1, kStreamThreads, 2 * kStreamThreads * 16, "stream_sums"), stream_sums<kBug>, out.get(),
              device_x.get());
  const std::vector<float> result = out.host();
  bool right = true;
  for (int t = 0; t < kStreamThreads; ++t) {
    float sum = 0;
    for (int step = 0; step < kStreamSteps; ++step)
      sum += x[(step * kStreamThreads + kStreamThreads - 1 - t) * 4];
    right &= result[t] == sum;
  }
  return right;
}

// ---- a matrix product in Hopper's way: TMA fills a ring, a warpgroup multiplies, TMA stores

constexpr int kTile = 64, kTileBytes = kTile * kTile * 2, kRing = 2, kChunks = 6;

/// c (64, 64) = a (64, 64 kChunks) b (64, 64 kChunks)^T. 128 threads multiply, thread 128 loads.
template <Bug kBug>
__global__ void product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                        const __grid_constant__ TensorMap c) {
  DYN_SMEM(char, smem, 1024);
  STATIC_SMEM(uint64_t, full, [kRing]);
  STATIC_SMEM(uint64_t, empty, [kRing]);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kRing; ++s) mbarrier_init(&full[s], 1), mbarrier_init(&empty[s], 4);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (threadIdx.x != 128) return;
    for (int i = 0; i < kChunks; ++i) {
      const int s = i % kRing;
      char* to = smem + s * 2 * kTileBytes;
      if (kBug != Bug::skipped_empty_wait) mbarrier_wait(&empty[s], (i / kRing & 1) ^ 1);
      mbarrier_arrive_expect_tx(&full[s], 2 * kTileBytes - (kBug == Bug::wrong_byte_count ? 128 : 0));
      tma_load_2d(to, &a, &full[s], i * kTile, 0);
      tma_load_2d(to + kTileBytes, &b, &full[s], i * kTile, 0);
    }
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  float sum[32];
  for (int i = 0; i < kChunks; ++i) {
    const int s = i % kRing;
    const uint32_t from = smem_addr(smem) + static_cast<uint32_t>(s * 2 * kTileBytes);
    mbarrier_wait(&full[s], (i / kRing & 1) ^ (kBug == Bug::wrong_phase));
    wgmma_fence();
    for (uint32_t k = 0; k < 4; ++k)
      wgmma_ss<Major::k, Major::k>(sum, smem_descriptor(from + 32 * k),
                                   smem_descriptor(from + kTileBytes + 32 * k), i > 0 || k > 0);
    wgmma_commit();
    if (kBug == Bug::early_release && lane == 0) mbarrier_arrive(&empty[s]);
    wgmma_wait<0>();
    if (kBug != Bug::early_release && lane == 0) mbarrier_arrive(&empty[s]);
  }
  char* staging = smem + kRing * 2 * kTileBytes;
  for (int j = 0; j < 4; ++j) {
    uint32_t r[4];
    for (int i = 0; i < 4; ++i) r[i] = pack_bf16(sum[8 * j + 2 * i], sum[8 * j + 2 * i + 1]);
    stmatrix_x4(smem_addr(staging) + swizzled(16 * warp + lane % 16, 2 * j + lane / 16), r);
  }
  if (kBug != Bug::missing_proxy_fence) fence_proxy_async();
  named_barrier_sync<1>(128);
  if (threadIdx.x != 0) return;
  tma_store_2d(&c, staging, 0, 0);
  tma_store_commit();
  tma_store_wait<0>();
}

template <Bug kBug>
bool product_is_right() {
  constexpr int kDepth = kTile * kChunks;
  std::vector<nv_bf16> a(kTile * kDepth), b(kTile * kDepth);
  const auto value = [](size_t i, int step) {
    return static_cast<float>(static_cast<int>(i * step % 5) - 2);
  };
  for (size_t i = 0; i < a.size(); ++i)
    a[i] = from_float<nv_bf16>(value(i, 7)), b[i] = from_float<nv_bf16>(value(i, 11));
  const DeviceArray<nv_bf16> device_a(a), device_b(b), c(kTile * kTile);
  const auto map = [](const DeviceArray<nv_bf16>& m, int columns) {
    return map_2d(m.get(), kTile, columns, kTile, kTile);
  };
  emu::launch(shape(1, 160 + 96, (2 * kRing + 1) * kTileBytes, "product"), product<kBug>,
              map(device_a, kDepth), map(device_b, kDepth), map(c, kTile));
  const std::vector<nv_bf16> result = c.host();
  bool right = true;
  for (int i = 0; i < kTile; ++i)
    for (int j = 0; j < kTile; ++j) {
      float sum = 0;
      for (int k = 0; k < kDepth; ++k) sum += value(i * kDepth + k, 7) * value(j * kDepth + k, 11);
      right &= to_float(result[i * kTile + j]) == to_float(from_float<nv_bf16>(sum));
    }
  return right;
}

// ---- one number for all blocks

template <Bug kBug>
__global__ void count_blocks(int* count) {
  if (threadIdx.x != 0) return;
  if (kBug == Bug::non_atomic_add)
    *count += 1;
  else
    atomicAdd(count, 1);
}

template <Bug kBug>
bool count_is_right() {
  constexpr int kBlocks = 64;
  const DeviceArray<int> count(std::vector<int>(1, 0));
  emu::launch(shape(kBlocks, 32, 0, "count_blocks"), count_blocks<kBug>, count.get());
  return count.host()[0] == kBlocks;
}

// ---- two streams

__global__ void write_seven(int* x) { x[threadIdx.x] = 7; }

/// A kernel on one stream, and a copy to the host on another one, which waits for it by an event.
template <Bug kBug>
bool copy_is_right() {
  constexpr int kNumbers = 32;
  const DeviceArray<int> x(std::vector<int>(kNumbers, 0));
  std::vector<int> copied(kNumbers, 0);
  cudaStream_t writes = nullptr, copies = nullptr;
  cudaEvent_t written = nullptr;
  cudaStreamCreateWithFlags(&writes, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking);
  cudaEventCreateWithFlags(&written, cudaEventDisableTiming);
  emu::LaunchParams launch = shape(1, kNumbers, 0, "write_seven");
  launch.stream = writes;
  emu::launch(launch, write_seven, x.get());
  cudaEventRecord(written, writes);
  if (kBug != Bug::missing_stream_wait) cudaStreamWaitEvent(copies, written, 0);
  cudaMemcpyAsync(copied.data(), x.get(), kNumbers * sizeof(int), cudaMemcpyDeviceToHost, copies);
  cudaStreamSynchronize(copies);
  const bool right = copied == std::vector<int>(kNumbers, 7);
  cudaStreamSynchronize(writes);
  cudaEventDestroy(written);
  cudaStreamDestroy(copies);
  cudaStreamDestroy(writes);
  return right;
}

}  // namespace

bool results_are_right(Bug bug) {
  switch (bug) {
    case Bug::none:
      return row_sums_are_right<Bug::none>() && stream_sums_are_right<Bug::none>() &&
             product_is_right<Bug::none>() && count_is_right<Bug::none>() && copy_is_right<Bug::none>();
    case Bug::missing_barrier:
      return row_sums_are_right<Bug::missing_barrier>();
    case Bug::missing_second_barrier:
      return row_sums_are_right<Bug::missing_second_barrier>();
    case Bug::missing_syncwarp:
      return row_sums_are_right<Bug::missing_syncwarp>();
    case Bug::global_out_of_bounds:
      return row_sums_are_right<Bug::global_out_of_bounds>();
    case Bug::shared_out_of_bounds:
      return row_sums_are_right<Bug::shared_out_of_bounds>();
    case Bug::misaligned_vector:
      return row_sums_are_right<Bug::misaligned_vector>();
    case Bug::less_aligned_shared:
      return row_sums_are_right<Bug::less_aligned_shared>();
    case Bug::cp_async_wait_off_by_one:
      return stream_sums_are_right<Bug::cp_async_wait_off_by_one>();
    case Bug::missing_refill_barrier:
      return stream_sums_are_right<Bug::missing_refill_barrier>();
    case Bug::early_release:
      return product_is_right<Bug::early_release>();
    case Bug::wrong_phase:
      return product_is_right<Bug::wrong_phase>();
    case Bug::wrong_byte_count:
      return product_is_right<Bug::wrong_byte_count>();
    case Bug::skipped_empty_wait:
      return product_is_right<Bug::skipped_empty_wait>();
    case Bug::missing_proxy_fence:
      return product_is_right<Bug::missing_proxy_fence>();
    case Bug::non_atomic_add:
      return count_is_right<Bug::non_atomic_add>();
    case Bug::missing_stream_wait:
      return copy_is_right<Bug::missing_stream_wait>();
  }
  return false;
}

}  // namespace sluice::cuda
