// What blocks, warps, atomics and schedules mean, against plain loops. (Instructions of PTX:
// conformance_test.cpp.)
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>

#include "support.h"

namespace sluice::cuda {
namespace {

using emu::launch;

/// Every schedule there is.
template <class F>
void in_every_schedule(F&& f) {
  for (uint64_t seed = 0; seed < 7; ++seed) {
    INFO("seed " << seed);
    const WithSeed with(seed);
    f();
  }
}

// ---- threads and blocks

__global__ void coordinates(int* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] += static_cast<int>(block * 1000 + thread);
}

TEST_CASE("every thread of every block runs once with the right indices", "[emulation]") {
  in_every_schedule([] {
    const DeviceArray<int> out(std::vector<int>(24 * 30, 0));
    launch(shape(dim3(2, 3, 4), dim3(5, 3, 2)), coordinates, out.get());
    const std::vector<int> result = out.host();
    for (int b = 0; b < 24; ++b)
      for (int t = 0; t < 30; ++t) CHECK(result[static_cast<size_t>(b * 30 + t)] == b * 1000 + t);
  });
}

__global__ void rotate_in_block(int* x, int steps) {
  STATIC_SMEM(int, shared, [1024]);
  int value = static_cast<int>(threadIdx.x);
  for (int i = 0; i < steps; ++i) {
    shared[threadIdx.x] = value;
    __syncthreads();
    value = shared[(threadIdx.x + 1) % blockDim.x];
    __syncthreads();
  }
  x[blockIdx.x * blockDim.x + threadIdx.x] = value;
}
__global__ void predicates(int* out) {
  const int count = __syncthreads_count(threadIdx.x % 3 == 0), all = __syncthreads_and(threadIdx.x < 99),
            any = __syncthreads_or(threadIdx.x == 5);
  if (threadIdx.x == 99) out[0] = count, out[1] = all, out[2] = any;
}

TEST_CASE("block barriers wait for all threads and count predicates", "[emulation]") {
  in_every_schedule([] {
    const DeviceArray<int> x(3 * 100), p(3);
    launch(shape(3, 100), rotate_in_block, x.get(), 7);
    const std::vector<int> result = x.host();
    for (size_t i = 0; i < result.size(); ++i) CHECK(result[i] == static_cast<int>((i % 100 + 7) % 100));
    launch(shape(1, 100), predicates, p.get());
    CHECK(p.host() == std::vector<int>{34, 0, 1});
  });
}

void* in_block(const void* p, unsigned rank) {
  const emu::Site site = emu::Site::cur();
  return emu::from_cluster(emu::to_cluster(p, rank), site);
}

__global__ void swap_in_cluster(int* out) {
  STATIC_SMEM(int, mine, [32]);
  mine[threadIdx.x] = static_cast<int>(blockIdx.x * 100 + threadIdx.x);
  emu::cluster_sync(emu::Site::cur());
  const int* theirs = static_cast<const int*>(in_block(mine, emu::g_cur->crank ^ 1));
  out[blockIdx.x * 32 + threadIdx.x] = theirs[threadIdx.x];
  emu::cluster_sync(emu::Site::cur());
}

TEST_CASE("Blocks of a cluster read each other's shared memory", "[emulation]") {
  in_every_schedule([] {
    const DeviceArray<int> out(8 * 32);
    emu::LaunchParams p = shape(8, 32);
    p.cluster = dim3(2);
    launch(p, swap_in_cluster, out.get());
    const std::vector<int> result = out.host();
    for (int i = 0; i < 256; ++i) CHECK(result[static_cast<size_t>(i)] == (i / 32 ^ 1) * 100 + i % 32);
  });
}

// ---- warps

constexpr int kWarpResults = 20;

__global__ void warp_functions(int* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int* r = out + threadIdx.x * kWarpResults;
  r[0] = __shfl_sync(kFullWarp, lane, 5);
  r[1] = __shfl_sync(kFullWarp, lane, 11, 8);
  r[2] = __shfl_up_sync(kFullWarp, lane, 3);
  r[3] = __shfl_up_sync(kFullWarp, lane, 3, 8);
  r[4] = __shfl_down_sync(kFullWarp, lane, 3, 8);
  r[5] = __shfl_xor_sync(kFullWarp, lane, 17);
  r[6] = static_cast<int>(__ballot_sync(kFullWarp, lane % 3 == 0));
  r[7] = __any_sync(kFullWarp, lane == 7);
  r[8] = __all_sync(kFullWarp, lane < 31);
  r[9] = static_cast<int>(__match_any_sync(kFullWarp, lane / 4));
  r[10] = __reduce_add_sync(kFullWarp, lane - 7);
  r[11] = __reduce_min_sync(kFullWarp, lane - 7);
  r[12] = static_cast<int>(__reduce_max_sync(kFullWarp, static_cast<unsigned>(lane * 5)));
  r[13] = static_cast<int>(__reduce_xor_sync(kFullWarp, 1u << lane | 1u));
  if (lane < 16)
    r[14] = __shfl_xor_sync(0x0000ffffu, lane, 8);
  else
    r[14] = __shfl_xor_sync(0xffff0000u, lane, 1);
  r[15] = static_cast<int>(2.0 * __shfl_xor_sync(kFullWarp, 0.5 * lane, 1));
  if (lane >= 20) return;
  r[16] = __shfl_sync(kFullWarp, lane, 1);  // lanes that have returned count as arrived
  __syncwarp();
  r[17] = __shfl_down_sync(0x000fffffu, lane, 1);
}

TEST_CASE("Shuffles, votes, matches and reductions of a warp", "[emulation]") {
  in_every_schedule([] {
    const DeviceArray<int> out(64 * kWarpResults);
    launch(shape(1, 64), warp_functions, out.get());
    const std::vector<int> result = out.host();
    unsigned thirds = 0;
    for (int l = 0; l < 32; l += 3) thirds |= 1u << l;
    for (int t = 0; t < 64; ++t) {
      const int l = t % 32;
      const int* r = &result[static_cast<size_t>(t * kWarpResults)];
      INFO("lane " << l);
      CHECK(r[0] == 5);
      CHECK(r[1] == l / 8 * 8 + 3);
      CHECK(r[2] == (l < 3 ? l : l - 3));
      CHECK(r[3] == (l % 8 < 3 ? l : l - 3));
      CHECK(r[4] == (l % 8 > 4 ? l : l + 3));
      CHECK(r[5] == (l ^ 17));
      CHECK(static_cast<unsigned>(r[6]) == thirds);
      CHECK(r[7] == 1);
      CHECK(r[8] == 0);
      CHECK(static_cast<unsigned>(r[9]) == 0xfu << l / 4 * 4);
      CHECK(r[10] == 496 - 32 * 7);
      CHECK(r[11] == -7);
      CHECK(r[12] == 155);
      CHECK(static_cast<unsigned>(r[13]) == 0xfffffffeu);
      CHECK(r[14] == (l < 16 ? l ^ 8 : l ^ 1));
      CHECK(r[15] == (l ^ 1));
      if (l < 20) CHECK(r[16] == 1);
      if (l < 19) CHECK(r[17] == l + 1);
    }
  });
}

// ---- atomics

__global__ void atomics(int* i, unsigned* u, float* f, unsigned long long* w, nv_bf162* b) {
  const int n = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(i, 1), atomicMax(i + 1, n), atomicMin(i + 2, -n);
  atomicInc(u, 9u), atomicOr(u + 1, 1u << n % 32), atomicExch(u + 2, 5u);
  if (atomicCAS(u + 3, 0u, 7u) == 0u) atomicAdd(u + 4, 1u);  // one of them
  atomicAdd(f, 0.5f);
  atomicAdd(w, 1ull << 32);
  atomicAdd(b, __floats2bfloat162_rn(1.0f, -1.0f));
}

TEST_CASE("atomics of many blocks lose no update", "[emulation]") {
  const DeviceArray<int> i(std::vector<int>(3, 0));
  const DeviceArray<unsigned> u(std::vector<unsigned>(5, 0));
  const DeviceArray<float> f(std::vector<float>{0});
  const DeviceArray<unsigned long long> w(std::vector<unsigned long long>{0});
  const DeviceArray<nv_bf162> b(std::vector<nv_bf162>{__floats2bfloat162_rn(0, 0)});
  launch(shape(4, 50), atomics, i.get(), u.get(), f.get(), w.get(), b.get());
  CHECK(i.host() == std::vector<int>{200, 199, -199});
  CHECK(u.host() == std::vector<unsigned>{0, 0xffffffffu, 5, 7, 1});
  CHECK(f.host()[0] == 100.0f);
  CHECK(w.host()[0] == 200ull << 32);
  CHECK(to_float(b.host()[0].x) == 200.0f);
  CHECK(to_float(b.host()[0].y) == -200.0f);
}

// ---- between blocks

__global__ void last_block_sums(const int* x, int* partial, unsigned* done, int* out) {
  STATIC_SMEM(bool, is_last, [1]);
  partial[blockIdx.x * 32 + threadIdx.x] = x[blockIdx.x * 32 + threadIdx.x];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last[0] = atomicAdd(done, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!is_last[0]) return;
  __threadfence();
  int sum = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) sum += partial[b * 32 + threadIdx.x];
  sum = __reduce_add_sync(kFullWarp, sum);
  if (threadIdx.x == 0) *out = sum;
}

TEST_CASE("the last block to finish sees the writes of the others", "[emulation]") {
  in_every_schedule([] {
    std::vector<int> x(64 * 32);
    std::iota(x.begin(), x.end(), 1);
    const DeviceArray<int> device_x(x), partial(x.size()), out(1);
    const DeviceArray<unsigned> done(std::vector<unsigned>{0});
    launch(shape(64, 32), last_block_sums, device_x.get(), partial.get(), done.get(), out.get());
    CHECK(out.host()[0] == 2048 * 2049 / 2);
  });
}

// ---- schedules

__global__ void order_of_warps(unsigned* next, unsigned* order) {
  for (int round = 0; round < 4; ++round) {
    if (threadIdx.x % 32 == 0) order[atomicAdd(next, 1u)] = threadIdx.x / 32;
    __syncwarp();
  }
}

std::vector<unsigned> schedule_of(uint64_t seed) {
  const WithSeed with(seed);
  const DeviceArray<unsigned> next(std::vector<unsigned>{0}), order(32);
  launch(shape(1, 256), order_of_warps, next.get(), order.get());
  return order.host();
}

TEST_CASE("a seed determines the schedule, and other seeds differ", "[emulation]") {
  std::vector<std::vector<unsigned>> schedules;
  for (uint64_t seed = 0; seed < 7; ++seed) {
    schedules.push_back(schedule_of(seed));
    CHECK(schedule_of(seed) == schedules.back());
    for (uint64_t other = 0; other < seed; ++other) CHECK(schedules[other] != schedules[seed]);
  }
}

__global__ void order_of_blocks(unsigned* next, unsigned* order) { order[atomicAdd(next, 1u)] = blockIdx.x; }

TEST_CASE("where the last woken is first, blocks start in descending order", "[emulation]") {
  const int threads = emu::threads();
  emu::set_threads(1);
  in_every_schedule([] {
    const DeviceArray<unsigned> next(std::vector<unsigned>{0}), order(5);
    launch(shape(5, 1), order_of_blocks, next.get(), order.get());
    std::vector<unsigned> expected = {0, 1, 2, 3, 4};
    if (emu::seed() % 3 == 2) std::reverse(expected.begin(), expected.end());
    CHECK(order.host() == expected);
  });
  emu::set_threads(threads);
}

__global__ void no_waiting(int* x) { x[blockIdx.x * blockDim.x + threadIdx.x] = 1; }

TEST_CASE("a kernel that never waits needs one switch per block", "[emulation]") {
  const DeviceArray<int> x(64 * 256);
  const emu::Stats before = emu::stats();
  launch(shape(64, 256), no_waiting, x.get());
  const emu::Stats after = emu::stats();
  CHECK(after.threads - before.threads == 64 * 256);
  CHECK(after.switches - before.switches == 2 * 64);
}

__global__ void load_rows(uint32_t* out, int pitch, bool swizzle) {
  DYN_SMEM(char, smem, 128);
  const int lane = static_cast<int>(threadIdx.x), row = lane % 16, vector = lane / 16;
  uint32_t r[4];
  ldmatrix_x4(r, smem_addr(smem) +
                     static_cast<uint32_t>(row * pitch + ((swizzle ? vector ^ (row & 7) : vector) << 4)));
  out[lane] = r[0];
}

TEST_CASE("Bank conflicts of ldmatrix are counted", "[emulation]") {
  const DeviceArray<uint32_t> out(32);
  const auto conflicts = [&](int pitch, bool swizzle) {
    const uint64_t before = emu::stats().ldsm_conflicts;
    launch(shape(1, 32, 16 * 256), load_rows, out.get(), pitch, swizzle);
    return emu::stats().ldsm_conflicts - before;
  };
  CHECK(conflicts(128, false) == 4 * 7);  // four phases of eight rows in the same banks
  CHECK(conflicts(128, true) == 0);
  CHECK(conflicts(144, false) == 0);
}

}  // namespace
}  // namespace sluice::cuda
