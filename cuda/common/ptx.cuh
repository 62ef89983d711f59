#pragma once
// A wrapper for each PTX instruction that kernels use, with two bodies: inline assembly for a GPU, a call
// into the emulator (tests/emulation) for the CPU. wgmma is in wgmma.cuh. Names follow the PTX ISA 9.0.
#include "common/device.cuh"

namespace sluice::cuda {

#ifdef SLUICE_EMULATION
using TensorMap = ::emu::TMap;

inline uint32_t smem_addr(const void* p) { return ::emu::to_shared(p); }
inline float ex2(float x) { return exp2f(x); }
inline float lg2(float x) { return log2f(x); }

// ---- matrices of 8 x 8 16-bit elements between shared memory and the registers of a warp
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t a, EMU_SITE) { ::emu::ldmatrix(r, a, 4, false, site); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t a, EMU_SITE) {
  ::emu::ldmatrix(r, a, 4, true, site);
}
inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t a, EMU_SITE) { ::emu::ldmatrix(r, a, 2, false, site); }
inline void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t a, EMU_SITE) {
  ::emu::ldmatrix(r, a, 2, true, site);
}
inline void stmatrix_x4(uint32_t a, const uint32_t (&r)[4], EMU_SITE) {
  ::emu::stmatrix(r, a, 4, false, site);
}
inline void stmatrix_x4_trans(uint32_t a, const uint32_t (&r)[4], EMU_SITE) {
  ::emu::stmatrix(r, a, 4, true, site);
}

/// d (16 x 8, f32) += a (16 x 16, bf16, row-major fragments) b (16 x 8, bf16, column-major fragments).
inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_SITE) {
  const uint32_t b[2] = {b0, b1};
  ::emu::mma_16816_bf16(d, a, b, d, site);
}

// ---- asynchronous copies of 16 bytes, global to shared; zeros where `valid` is false
inline void cp_async_16(uint32_t dst, const void* src, bool valid, EMU_SITE) {
  ::emu::cp_async(::emu::from_shared(dst), src, 16, valid ? 16 : 0, site);
}
inline void cp_async_commit() { ::emu::cp_async_commit(); }
template <int kPending>
inline void cp_async_wait() {
  ::emu::cp_async_wait(kPending);
}

// ---- barriers
template <int kId>
inline void named_barrier_sync(int threads, EMU_SITE) {
  ::emu::bar_sync(kId, threads, site);
}
template <int kId>
inline void named_barrier_arrive(int threads, EMU_SITE) {
  ::emu::bar_arrive(kId, threads, site);
}
inline void mbarrier_init(uint64_t* b, unsigned count, EMU_SITE) { ::emu::mbar_init(b, count, site); }
inline void mbarrier_arrive(uint64_t* b, EMU_SITE) { ::emu::mbar_arrive(b, 1, site); }
inline void mbarrier_arrive_expect_tx(uint64_t* b, unsigned bytes, EMU_SITE) {
  ::emu::mbar_expect_tx(b, bytes, site);
  ::emu::mbar_arrive(b, 1, site);
}
inline void mbarrier_wait(uint64_t* b, unsigned parity, EMU_SITE) { ::emu::mbar_wait(b, parity, site); }
// ---- the blocks of a cluster. An address in the cluster names a variable of any of its blocks, which must
// have started (cluster_sync) and must not have ended. Nothing but the phase of a barrier is ordered by an
// arrival in another block: ordinary stores before it may arrive later.
inline unsigned cluster_rank() { return ::emu::g_cur->crank; }
/// By whole warps. What was written to shared memory of the cluster before is visible after.
inline void cluster_sync(EMU_SITE) { ::emu::cluster_sync(site); }
inline uint32_t cluster_address(const void* p, unsigned rank) { return ::emu::to_cluster(p, rank); }
/// Two floats to the variable of the same name in block `rank`.
template <class T>
inline void store_to_block(T* p, unsigned rank, float a, float b, EMU_SITE) {
  static_assert(sizeof(T) == 8 && alignof(T) == 8);
  *static_cast<T*>(::emu::from_cluster(cluster_address(p, rank), site)) = {a, b};
}
inline void mbarrier_arrive_cluster(uint32_t b, EMU_SITE) {
  ::emu::mbar_arrive(static_cast<uint64_t*>(::emu::from_cluster(b, site)), 1, site);
}
inline void mbarrier_arrive_expect_tx_cluster(uint32_t b, unsigned bytes, EMU_SITE) {
  auto* barrier = static_cast<uint64_t*>(::emu::from_cluster(b, site));
  ::emu::mbar_expect_tx(barrier, bytes, site);
  ::emu::mbar_arrive(barrier, 1, site);
}
/// Counts as a transfer of four bytes for the barrier, in the same block, that makes it visible.
inline void store_async(uint32_t to, int value, uint32_t b, EMU_SITE) {
  ::emu::store_async(to, value, b, site);
}
inline void fence_mbarrier_init() { ::emu::thread_fence(); }
inline void fence_proxy_async() { ::emu::fence_proxy_async(); }
/// Between loads and stores of global memory and asynchronous copies of it.
inline void fence_proxy_async_global() {}

// ---- tensor memory accelerator
inline void tma_load_2d(void* dst, const TensorMap* map, uint64_t* barrier, int x, int y, EMU_SITE) {
  const int c[2] = {x, y};
  ::emu::tma_load(dst, map, barrier, c, 2, site);
}
inline void tma_load_3d(void* dst, const TensorMap* map, uint64_t* barrier, int x, int y, int z, EMU_SITE) {
  const int c[3] = {x, y, z};
  ::emu::tma_load(dst, map, barrier, c, 3, site);
}
/// To the same place in every block of the cluster whose bit is set, for the barrier at the same place there.
inline void tma_load_2d_multicast(void* dst, const TensorMap* map, uint64_t* barrier, int x, int y,
                                  unsigned blocks, EMU_SITE) {
  const int c[2] = {x, y};
  ::emu::tma_load_multicast(dst, map, barrier, c, 2, blocks, site);
}
inline void tma_load_3d_multicast(void* dst, const TensorMap* map, uint64_t* barrier, int x, int y, int z,
                                  unsigned blocks, EMU_SITE) {
  const int c[3] = {x, y, z};
  ::emu::tma_load_multicast(dst, map, barrier, c, 3, blocks, site);
}
inline void tma_store_2d(const TensorMap* map, const void* src, int x, int y, EMU_SITE) {
  const int c[2] = {x, y};
  ::emu::tma_store(map, src, c, 2, site);
}
inline void tma_store_3d(const TensorMap* map, const void* src, int x, int y, int z, EMU_SITE) {
  const int c[3] = {x, y, z};
  ::emu::tma_store(map, src, c, 3, site);
}
/// Adds a box of f32 to the tensor, element by element.
inline void tma_add_3d(const TensorMap* map, const void* src, int x, int y, int z, EMU_SITE) {
  const int c[3] = {x, y, z};
  ::emu::tma_add(map, src, c, 3, site);
}
inline void tma_store_commit() { ::emu::bulk_commit(); }
/// Waits until at most kPending groups of stores still read shared memory.
template <int kPending>
inline void tma_store_wait_read() {
  ::emu::bulk_wait(kPending);
}
/// Waits until at most kPending groups of stores are not yet visible.
template <int kPending>
inline void tma_store_wait() {
  ::emu::bulk_wait(kPending);
}
/// Contiguous bytes (a multiple of 16) from shared to global memory, in the current group of stores: copied,
/// or added element by element.
inline void bulk_store(void* dst, const void* src, unsigned bytes, EMU_SITE) {
  ::emu::bulk_store(dst, src, bytes, site);
}
inline void bulk_reduce_add(float* dst, const void* src, unsigned bytes, EMU_SITE) {
  ::emu::bulk_reduce_add(dst, src, bytes, site);
}

inline bool elect_one() { return ::emu::g_cur->lane == 0; }
template <int kRegisters>
inline void setmaxnreg_inc(EMU_SITE) {
  ::emu::setmaxnreg(kRegisters, site);
}
template <int kRegisters>
inline void setmaxnreg_dec(EMU_SITE) {
  ::emu::setmaxnreg(kRegisters, site);
}

/// Polls until f() is true. Between blocks it may wait only for blocks of lower id.
template <class F>
inline void spin_until(F&& f) {
  while (!f()) ::emu::yield();
}
/// Loads and stores between blocks that also make earlier writes of the writer visible (acquire, release;
/// scope gpu).
inline int load_acquire(const int* p) {
  const int v = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  ::emu::thread_fence();
  return v;
}
inline void store_release(int* p, int v) {
  ::emu::thread_fence();
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

#else  // ----------------------------------------------------------------------------------------------------------
       // GPU
using TensorMap = CUtensorMap;

DEVICE_INLINE uint32_t smem_addr(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
DEVICE_INLINE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE_INLINE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE_INLINE void ldmatrix_x4(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
DEVICE_INLINE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
DEVICE_INLINE void ldmatrix_x2(uint32_t (&r)[2], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(a)
               : "memory");
}
DEVICE_INLINE void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(a)
               : "memory");
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
DEVICE_INLINE void stmatrix_x4(uint32_t a, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
DEVICE_INLINE void stmatrix_x4_trans(uint32_t a, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif

DEVICE_INLINE void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE_INLINE void cp_async_16(uint32_t dst, const void* src, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
DEVICE_INLINE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
DEVICE_INLINE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

template <int kId>
DEVICE_INLINE void named_barrier_sync(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "r"(threads) : "memory");
}
template <int kId>
DEVICE_INLINE void named_barrier_arrive(int threads) {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "r"(threads) : "memory");
}

template <class F>
DEVICE_INLINE void spin_until(F&& f) {
  while (!f()) __nanosleep(32);
}
DEVICE_INLINE int load_acquire(const int* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE_INLINE void store_release(int* p, int v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
DEVICE_INLINE void mbarrier_init(uint64_t* b, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(b)), "r"(count) : "memory");
}
DEVICE_INLINE void mbarrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(b)) : "memory");
}
DEVICE_INLINE void mbarrier_arrive_expect_tx(uint64_t* b, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(b)), "r"(bytes)
               : "memory");
}
DEVICE_INLINE void mbarrier_wait(uint64_t* b, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(smem_addr(b)),
      "r"(parity)
      : "memory");
}
DEVICE_INLINE unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE_INLINE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEVICE_INLINE uint32_t cluster_address(const void* p, unsigned rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_addr(p)), "r"(rank));
  return address;
}
template <class T>
DEVICE_INLINE void store_to_block(T* p, unsigned rank, float a, float b) {
  static_assert(sizeof(T) == 8 && alignof(T) == 8);
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(cluster_address(p, rank)), "f"(a), "f"(b)
               : "memory");
}
// Without .release.cluster, which ptxas makes a fence of the whole GPU of.
DEVICE_INLINE void mbarrier_arrive_cluster(uint32_t b) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(b) : "memory");
}
DEVICE_INLINE void mbarrier_arrive_expect_tx_cluster(uint32_t b, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEVICE_INLINE void store_async(uint32_t to, int value, uint32_t b) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(to),
               "r"(value), "r"(b)
               : "memory");
}
DEVICE_INLINE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE_INLINE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE_INLINE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

DEVICE_INLINE void tma_load_2d(void* dst, const TensorMap* map, uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], "
      "[%2];" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(barrier)), "r"(x), "r"(y)
      : "memory");
}
DEVICE_INLINE void tma_load_3d(void* dst, const TensorMap* map, uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], "
      "[%2];" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
DEVICE_INLINE void tma_load_2d_multicast(void* dst, const TensorMap* map, uint64_t* barrier, int x, int y,
                                         unsigned blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3,%4}], [%2], %5;" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(barrier)), "r"(x), "r"(y), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}
DEVICE_INLINE void tma_load_3d_multicast(void* dst, const TensorMap* map, uint64_t* barrier, int x, int y,
                                         int z, unsigned blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3,%4,%5}], [%2], %6;" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(barrier)), "r"(x), "r"(y), "r"(z), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}
DEVICE_INLINE void tma_store_2d(const TensorMap* map, const void* src, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2,%3}], [%1];" ::"l"(map),
               "r"(smem_addr(src)), "r"(x), "r"(y)
               : "memory");
}
DEVICE_INLINE void tma_store_3d(const TensorMap* map, const void* src, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2,%3,%4}], [%1];" ::"l"(map),
               "r"(smem_addr(src)), "r"(x), "r"(y), "r"(z)
               : "memory");
}
DEVICE_INLINE void tma_add_3d(const TensorMap* map, const void* src, int x, int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2,%3,%4}], [%1];" ::"l"(
          map),
      "r"(smem_addr(src)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
DEVICE_INLINE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
DEVICE_INLINE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
DEVICE_INLINE void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
DEVICE_INLINE void bulk_store(void* dst, const void* src, unsigned bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(dst)),
      "r"(smem_addr(src)), "r"(bytes)
      : "memory");
}
DEVICE_INLINE void bulk_reduce_add(float* dst, const void* src, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(dst)),
               "r"(smem_addr(src)), "r"(bytes)
               : "memory");
}

DEVICE_INLINE bool elect_one() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }" : "=r"(elected));
  return elected;
}
template <int kRegisters>
DEVICE_INLINE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
DEVICE_INLINE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
#endif  // sm_90
#endif  // SLUICE_EMULATION

/// Two floats as one register of bf16, `low` in the lower half: the order of mma fragments.
DEVICE_INLINE uint32_t pack_bf16(float low, float high) {
  const nv_bf162 v = __floats2bfloat162_rn(low, high);
  uint32_t u;
  memcpy(&u, &v, sizeof u);
  return u;
}

}  // namespace sluice::cuda
