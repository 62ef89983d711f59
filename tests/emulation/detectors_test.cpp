// Every detector fires: one faulty kernel each, and the words its report must contain. (What only a sanitizer
// sees is in planted_bugs_test.cpp.)
#include <catch2/catch.hpp>

#include "common/wgmma.cuh"
#include "support.h"

namespace sluice::cuda {
namespace {

using Catch::Contains;
using emu::launch;

#define CHECK_REPORTS(text, ...) CHECK_THAT(error_of([&] { __VA_ARGS__; }), Contains(text))

// ---- block barriers

__global__ void divergent_barrier() {
  if (threadIdx.x < 64)
    __syncthreads();
  else
    __syncthreads();
}
__global__ void leaves_before_the_barrier(int stay) {
  if (static_cast<int>(threadIdx.x) >= stay) return;
  __syncthreads();
}
__global__ void two_counts() {
  if (threadIdx.x < 32)
    named_barrier_sync<1>(64);
  else
    named_barrier_sync<1>(96);
}
__global__ void odd_count() { named_barrier_sync<1>(48); }

TEST_CASE("divergent barriers are reported with both source locations", "[detectors]") {
  const std::string text = error_of([] { launch(shape(1, 128, 0, "walks"), divergent_barrier); });
  CHECK_THAT(text, Contains("kernel walks, block (0,0,0), thread (64,0,0), seed"));
  CHECK_THAT(text, Contains("divergent __syncthreads: thread 0 waits at"));
  // Both lines, two apart in this file.
  const size_t first = text.find("detectors_test.cpp:"), second = text.rfind("detectors_test.cpp:");
  REQUIRE(first != std::string::npos);
  REQUIRE(second > first);
  CHECK(std::stoi(text.substr(second + 19)) - std::stoi(text.substr(first + 19)) == 2);

  const std::string dead = error_of([] { launch(shape(1, 128), leaves_before_the_barrier, 100); });
  CHECK_THAT(dead, Contains("deadlock"));
  CHECK_THAT(dead, Contains("28 thread(s) exited, first thread (100,0,0)"));
  CHECK_THAT(dead, Contains("100 thread(s) waiting in __syncthreads at"));
  CHECK_REPORTS("thread count mismatch", launch(shape(1, 96), two_counts));
  CHECK_REPORTS("no multiple of 32", launch(shape(1, 64), odd_count));
}

// ---- warp collectives

__global__ void divergent_shuffle() {
  if (threadIdx.x < 7)
    __shfl_sync(kFullWarp, 1, 0);
  else
    __shfl_sync(kFullWarp, 1, 0);
}
__global__ void lane_not_in_mask() { __shfl_sync(0x0000ffffu, 1, 0); }
__global__ void one_lane_forgets() {
  if (threadIdx.x != 3) __syncwarp();
  __syncthreads();
}

TEST_CASE("Warp collectives in divergent code are reported", "[detectors]") {
  CHECK_REPORTS("warp collective mismatch: lanes 0000007f wait in __shfl_sync",
                launch(shape(1, 32), divergent_shuffle));
  CHECK_REPORTS("is not in its mask 0000ffff", launch(shape(1, 32), lane_not_in_mask));
  CHECK_REPORTS("31 thread(s) waiting in __syncwarp", launch(shape(1, 32), one_lane_forgets));
}

// ---- shared memory

__global__ void load_matrix_at(int byte) {
  DYN_SMEM(char, smem, 128);
  uint32_t r[4];
  ldmatrix_x4(r, smem_addr(smem) + static_cast<uint32_t>(byte));
}
__global__ void store_matrix_at(int byte) {
  DYN_SMEM(char, smem, 128);
  const uint32_t r[4] = {};
  stmatrix_x4(smem_addr(smem) + static_cast<uint32_t>(byte), r);
}
__global__ void writes_past_dynamic(int index) {
  DYN_SMEM(int, smem, 16);
  smem[index] = 1;
}
__global__ void writes_past_static(int index) {
  STATIC_SMEM(int, values, [32]);
  volatile int* p = values;
  p[index] = 1;
}
__global__ void too_much_static() {
  STATIC_SMEM(char, big, [49 * 1024]);
  big[threadIdx.x] = 0;
}
__global__ void static_beside_dynamic() {
  DYN_SMEM(char, dynamic, 1024);
  STATIC_SMEM(char, fixed, [784]);
  dynamic[threadIdx.x] = fixed[threadIdx.x] = 0;
}
__global__ void address_of_a_local() {
  int local = 0;
  (void)smem_addr(&local);
}
__global__ void two_alignments() {
  DYN_SMEM(char, a, 16);
  DYN_SMEM(char, b, 1024);
  a[0] = b[0];
}

TEST_CASE("Shared memory: misaligned and out of bounds accesses are reported", "[detectors]") {
  CHECK_REPORTS("ldmatrix: row address 1160 is not 16-byte aligned",
                launch(shape(1, 32, 1024), load_matrix_at, 8));
  CHECK_REPORTS("ldmatrix: shared memory out of bounds", launch(shape(1, 32, 1024), load_matrix_at, 1024));
  CHECK_REPORTS("ldmatrix: shared memory out of bounds", launch(shape(1, 32, 1024), load_matrix_at, -16));
  CHECK_REPORTS("stmatrix: row address", launch(shape(1, 32, 1024), store_matrix_at, 4));
  CHECK_REPORTS("stmatrix: shared memory out of bounds", launch(shape(1, 32, 1024), store_matrix_at, 4096));
  CHECK_REPORTS("byte 8 past the end of dynamic", launch(shape(1, 32, 1024), writes_past_dynamic, 258));
  CHECK_REPORTS("byte 0 past the end of a static shared variable",
                launch(shape(1, 32), writes_past_static, 32));
  CHECK_REPORTS("48 KiB is the limit", launch(shape(1, 32), too_much_static));
  // 48 KiB are for both together, unless the kernel asks for more.
  emu::LaunchParams full = shape(1, 32, 48 * 1024);
  CHECK_NOTHROW(launch(full, static_beside_dynamic));
  full.asks_for_smem = false;
  CHECK_REPORTS("784 bytes of static and 49152 of dynamic shared memory; 48 KiB is the limit",
                launch(full, static_beside_dynamic));
  full.dyn_smem = 47 * 1024;
  CHECK_NOTHROW(launch(full, static_beside_dynamic));
  CHECK_REPORTS("not into the block's shared memory", launch(shape(1, 32), address_of_a_local));
  CHECK_REPORTS("two alignments", launch(shape(1, 32, 64), two_alignments));
}

__global__ void reads_poison(float* out) {
  DYN_SMEM(float, smem, 16);
  out[threadIdx.x] = smem[threadIdx.x];
}

TEST_CASE("shared memory is initialised to NaN", "[detectors]") {
  DeviceArray<float> out(32);
  launch(shape(1, 32, 128), reads_poison, out.get());
  for (const float x : out.host()) CHECK(std::isnan(x));
}

// ---- cp.async

__global__ void copies(const float* from, int offset, bool waits) {
  DYN_SMEM(float, smem, 16);
  cp_async_16(smem_addr(smem) + threadIdx.x * 16, from + threadIdx.x * 4 + offset, true);
  cp_async_commit();
  if (waits) cp_async_wait<0>();
}

TEST_CASE("cp.async: misaligned, out of bounds and unfinished copies are reported", "[detectors]") {
  DeviceArray<float> from(256);
  CHECK(error_of([&] { launch(shape(1, 32, 512), copies, from.get(), 0, true); }).empty());
  CHECK_REPORTS("exits with 1 cp.async", launch(shape(1, 32, 512), copies, from.get(), 0, false));
  CHECK_REPORTS("cp.async: misaligned address", launch(shape(1, 32, 512), copies, from.get(), 1, true));
  CHECK_REPORTS("cp.async: shared memory out of bounds",
                launch(shape(1, 64, 512), copies, from.get(), 0, true));
}

__global__ void looks_early(float* out, const float* in) {
  DYN_SMEM(float, smem, 16);
  for (int group = 0; group < 3; ++group) {
    cp_async_16(smem_addr(smem) + group * 16, in + group * 4, true);
    cp_async_commit();
  }
  cp_async_wait<1>();
  for (int group = 0; group < 3; ++group) out[group] = smem[group * 4];
  cp_async_wait<0>();
  out[3] = smem[8];
}

TEST_CASE("in order, a copy completes as late as its wait allows, and its destination is NaN until then",
          "[detectors]") {
  const DeviceArray<float> in(std::vector<float>(12, 5.0f)), out(4);
  const WithSeed in_order(0);
  launch(shape(1, 1, 48), looks_early, out.get(), in.get());
  const std::vector<float> seen = out.host();
  CHECK(seen[0] == 5.0f);
  CHECK(seen[1] == 5.0f);
  CHECK(std::isnan(seen[2]));
  CHECK(seen[3] == 5.0f);
}

// ---- mbarrier

__global__ void mbarrier_faults(int fault) {
  STATIC_SMEM(uint64_t, barrier, [2]);
  if (threadIdx.x == 0 && fault != 0) mbarrier_init(barrier, fault == 3 ? 2000 : 2);
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive(barrier);
    if (fault == 1)
      for (int i = 0; i < 2; ++i) mbarrier_arrive_expect_tx(barrier, 16);
  }
  mbarrier_wait(barrier, 0);
}

TEST_CASE("mbarriers: uninitialised, arrived at too often, never completed", "[detectors]") {
  CHECK_REPORTS("before its initialisation", launch(shape(1, 32), mbarrier_faults, 0));
  CHECK_REPORTS("more arrivals in a phase than the 2", launch(shape(1, 32), mbarrier_faults, 1));
  CHECK_REPORTS("32 thread(s) waiting in mbarrier wait", launch(shape(1, 32), mbarrier_faults, 2));
  CHECK_REPORTS("a count of 2000", launch(shape(1, 32), mbarrier_faults, 3));
}

// ---- TMA

__global__ void loads_tile(const __grid_constant__ TensorMap map, int offset, unsigned bytes) {
  DYN_SMEM(char, smem, 1024);
  STATIC_SMEM(uint64_t, barrier, [1]);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_arrive_expect_tx(barrier, bytes);
    tma_load_2d(smem + offset, &map, barrier, 0, 0);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
}
__global__ void stores_tile(const __grid_constant__ TensorMap map, bool waits) {
  DYN_SMEM(char, smem, 1024);
  if (threadIdx.x != 0) return;
  for (int i = 0; i < 8192; ++i) smem[i] = 0;
  fence_proxy_async();
  tma_store_2d(&map, smem, 0, 0);
  tma_store_commit();
  if (waits) tma_store_wait_read<0>();
}

__global__ void adds_tile(const __grid_constant__ TensorMap map) {
  DYN_SMEM(char, smem, 1024);
  if (threadIdx.x == 0) tma_add_3d(&map, smem, 0, 0, 0);
}

TEST_CASE("TMA: the rules of tensor maps, tiles and byte counts are kept", "[detectors]") {
  DeviceArray<nv_bf16> tensor(64 * 72);
  const TensorMap good = map_2d(tensor.get(), 64, 64, 64, 64);
  const auto load = [&](const TensorMap& m, int offset = 0, size_t smem = 16384, unsigned bytes = 8192) {
    return error_of([&] { launch(shape(1, 32, smem), loads_tile, m, offset, bytes); });
  };
  CHECK(load(good).empty());
  CHECK_THAT(load(good, 512), Contains("is not 1024-byte aligned"));
  CHECK_THAT(load(good, 0, 4096), Contains("TMA: shared memory out of bounds"));
  CHECK_THAT(load(good, 0, 16384, 8192 + 16), Contains("deadlock"));
  TensorMap m = good;
  m.magic = 0;
  CHECK_THAT(load(m), Contains("not a tensor map"));
  m = good, m.rank = 3;
  CHECK_THAT(load(m), Contains("rank 3 used as 2"));
  m = good, m.base += 8;
  CHECK_THAT(load(m), Contains("global address not 16-byte aligned"));
  m = good, m.stride[1] = 130;
  CHECK_THAT(load(m), Contains("stride 1 of 130 bytes is no multiple of 16"));
  m = good, m.box[1] = 257;
  CHECK_THAT(load(m), Contains("box dimension 1 is 257"));
  m = good, m.box[0] = 72;
  CHECK_THAT(load(m), Contains("exceeds the swizzle span 128"));
  m = good, m.box[0] = 12;
  CHECK_THAT(load(m), Contains("inner box of 24 bytes is no multiple of 16"));

  CHECK(error_of([&] { launch(shape(1, 32, 8192), stores_tile, good, true); }).empty());
  CHECK_REPORTS("exits with 1 bulk stores", launch(shape(1, 32, 8192), stores_tile, good, false));
  CHECK_REPORTS("adds f32, not elements of 2 bytes", launch(shape(1, 32, 8192), adds_tile, good));
}

enum class ClusterFault { none, ends_early, starts_late, block_outside, no_address };

/// Each block of a cluster arrives at the other's barrier.
__global__ void meets_other_block(ClusterFault fault) {
  DYN_SMEM(uint64_t, barrier, 16);
  if (threadIdx.x == 0) mbarrier_init(barrier, 1);
  if (fault != ClusterFault::starts_late) cluster_sync();
  const unsigned other = fault == ClusterFault::block_outside ? 2 : cluster_rank() ^ 1;
  if (threadIdx.x == 0)
    mbarrier_arrive_cluster(fault == ClusterFault::no_address ? smem_addr(barrier)
                                                              : cluster_address(barrier, other));
  if (fault == ClusterFault::ends_early && cluster_rank() == 1) return;
  if (fault == ClusterFault::ends_early) {
    for (int i = 0; i < 100; ++i) emu::yield();
    mbarrier_arrive_cluster(cluster_address(barrier, other));
    return;
  }
  mbarrier_wait(barrier, 0);
  cluster_sync();
}

TEST_CASE("Clusters: blocks are there, from their first barrier to their end", "[detectors]") {
  const auto run = [](ClusterFault f) {
    return error_of([&] {
      emu::LaunchParams p = shape(2, 32, 16);
      p.cluster = dim3(2);
      launch(p, meets_other_block, f);
    });
  };
  CHECK(run(ClusterFault::none).empty());
  CHECK_THAT(run(ClusterFault::ends_early), Contains("block 1 of the cluster, which has ended"));
  CHECK_THAT(run(ClusterFault::starts_late), Contains("block 1 of the cluster, which has not begun"));
  CHECK_THAT(run(ClusterFault::block_outside), Contains("block 2 of a cluster of 2"));
  CHECK_THAT(run(ClusterFault::no_address), Contains("is no address in the cluster"));
}

__global__ void adds_to(float* to, int offset, unsigned bytes) {
  DYN_SMEM(float, smem, 128);
  for (int i = 0; i < 64; ++i) smem[i] = 1;
  fence_proxy_async();
  bulk_reduce_add(to, smem + offset, bytes);
  tma_store_commit();
  tma_store_wait<0>();
}

TEST_CASE("Bulk copies: multiples of 16 bytes, inside shared memory", "[detectors]") {
  DeviceArray<float> to(64);
  CHECK(error_of([&] { launch(shape(1, 1, 256), adds_to, to.get(), 0, 256u); }).empty());
  CHECK_REPORTS("multiples of 16", launch(shape(1, 1, 256), adds_to, to.get(), 1, 64u));
  CHECK_REPORTS("multiples of 16", launch(shape(1, 1, 256), adds_to, to.get(), 0, 60u));
  CHECK_REPORTS("multiples of 16", launch(shape(1, 1, 256), adds_to, to.get() + 1, 0, 64u));
  CHECK_REPORTS("shared memory out of bounds", launch(shape(1, 1, 256), adds_to, to.get(), 32, 256u));
}

// ---- wgmma and registers

enum class WgmmaFault { none, no_fence, touched, different_descriptors, no_wait, out_of_bounds };

__global__ void wgmma_faults(WgmmaFault fault) {
  DYN_SMEM(nv_bf16, smem, 1024);
  for (unsigned i = threadIdx.x; i < 2 * 64 * 64; i += blockDim.x) smem[i] = from_float<nv_bf16>(1.0f);
  fence_proxy_async();
  __syncthreads();
  float d[32];
  const uint32_t a = smem_addr(smem), b = a + 8192 + (fault == WgmmaFault::out_of_bounds ? 4096 : 0);
  const uint32_t shift = fault == WgmmaFault::different_descriptors && threadIdx.x == 9 ? 32 : 0;
  if (fault != WgmmaFault::no_fence) wgmma_fence();
  wgmma_ss<Major::k, Major::k>(d, smem_descriptor(a + shift), smem_descriptor(b), false);
  wgmma_commit();
  if (fault == WgmmaFault::touched) d[3] = 0;
  if (fault != WgmmaFault::no_wait) wgmma_wait<0>();
}
__global__ void reads_accumulators(float* out) {
  DYN_SMEM(nv_bf16, smem, 1024);
  for (unsigned i = threadIdx.x; i < 2 * 64 * 64; i += blockDim.x) smem[i] = from_float<nv_bf16>(1.0f);
  fence_proxy_async();
  __syncthreads();
  float first[32], second[32];
  const uint64_t a = smem_descriptor(smem_addr(smem)), b = smem_descriptor(smem_addr(smem) + 8192);
  wgmma_fence();
  wgmma_ss<Major::k, Major::k>(first, a, b, false);
  wgmma_commit();
  wgmma_ss<Major::k, Major::k>(second, a, b, false);
  wgmma_commit();
  float* mine = out + 4 * threadIdx.x;
  mine[0] = first[7];
  wgmma_wait<1>();
  mine[1] = first[7], mine[2] = second[7];
  wgmma_wait<0>();
  mine[3] = second[7];
}

TEST_CASE("Accumulators of wgmma are NaN until their own group has been waited for", "[detectors]") {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    const WithSeed with(seed);
    const DeviceArray<float> out(512);
    launch(shape(1, 128, 16384), reads_accumulators, out.get());
    const std::vector<float> seen = out.host();
    for (size_t t = 0; t < 128; ++t) {
      CHECK(std::isnan(seen[4 * t]));
      CHECK(seen[4 * t + 1] == 16.0f);
      CHECK(std::isnan(seen[4 * t + 2]));
      CHECK(seen[4 * t + 3] == 16.0f);
    }
  }
}

__global__ void wants_registers() { setmaxnreg_inc<240>(); }

TEST_CASE("wgmma: fences, descriptors, accumulators in flight and register budgets are watched",
          "[detectors]") {
  const auto run = [](WgmmaFault f) {
    return error_of([&] { launch(shape(1, 128, 16384), wgmma_faults, f); });
  };
  CHECK(run(WgmmaFault::none).empty());
  CHECK_THAT(run(WgmmaFault::no_fence), Contains("wgmma without a wgmma.fence"));
  CHECK_THAT(run(WgmmaFault::touched), Contains("accumulator register 3 was written while in flight"));
  CHECK_THAT(run(WgmmaFault::different_descriptors), Contains("differ between lanes of a warp"));
  CHECK_THAT(run(WgmmaFault::no_wait), Contains("wgmma that it has not waited for"));
  CHECK_THAT(run(WgmmaFault::out_of_bounds), Contains("wgmma operand: shared memory out of bounds"));
  CHECK_REPORTS("asks for 92160 registers", launch(shape(1, 384), wants_registers));
}

// ---- global memory

__global__ void reads_at(const int* p, int* out) { *out = *p; }

TEST_CASE("global memory: access to an unmapped page fails the kernel, not the program", "[detectors]") {
  const DeviceArray<int> x(std::vector<int>(64, 3)), out(1);
  CHECK(error_of([&] { launch(shape(1, 1), reads_at, x.get() + 63, out.get()); }).empty());
  for (int i = 0; i < 2; ++i) {
    CHECK_REPORTS("outside of every allocation", launch(shape(1, 1), reads_at, x.get() + 64, out.get()));
    CHECK_REPORTS("kernel test, block (0,0,0)", launch(shape(1, 1), reads_at, nullptr, out.get()));
  }
}

// ---- launches

__global__ void nothing() {}

TEST_CASE("Launches: impossible configurations are refused", "[detectors]") {
  CHECK_REPORTS("more than 1024 threads", launch(shape(1, 1025), nothing));
  CHECK_REPORTS("a dimension is zero", launch(shape(dim3(0, 1, 1), 32), nothing));
  CHECK_REPORTS("65535", launch(shape(dim3(1, 70000, 1), 32), nothing));
  CHECK_REPORTS("227 KiB", launch(shape(1, 32, 228 << 10), nothing));
  emu::LaunchParams p = shape(3, 32);
  p.cluster = dim3(2);
  CHECK_REPORTS("not a multiple of the cluster", launch(p, nothing));
}

TEST_CASE("the emulator remains usable after every failure", "[detectors]") {
  for (int i = 0; i < 3; ++i) {
    CHECK_FALSE(error_of([] { launch(shape(1, 128), divergent_barrier); }).empty());
    CHECK(error_of([] { launch(shape(4, 1024), leaves_before_the_barrier, 1024); }).empty());
  }
}

}  // namespace
}  // namespace sluice::cuda
