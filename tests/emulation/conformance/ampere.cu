#include "device.h"

namespace sluice::conformance {
namespace {

using namespace sluice::cuda;

// ---- ldmatrix: a tile of 16 rows and 16 columns, 32 bytes a row

template <int kMatrices, bool kTransposed>
__global__ void load_matrices(uint32_t* out, const uint32_t* in) {
  DYN_SMEM(uint32_t, tile, 128);
  for (unsigned i = threadIdx.x; i < 128; i += 32) tile[i] = in[i];
  __syncwarp();
  const unsigned lane = threadIdx.x;
  const uint32_t at = smem_addr(tile) + lane % 16 * 32 + lane / 16 * 16;
  if constexpr (kMatrices == 4) {
    uint32_t r[4];
    if constexpr (kTransposed)
      ldmatrix_x4_trans(r, at);
    else
      ldmatrix_x4(r, at);
    for (int i = 0; i < 4; ++i) out[4 * lane + i] = r[i];
  } else {
    uint32_t r[2];
    if constexpr (kTransposed)
      ldmatrix_x2_trans(r, at);
    else
      ldmatrix_x2(r, at);
    for (int i = 0; i < 2; ++i) out[2 * lane + i] = r[i];
  }
}

template <int kMatrices, bool kTransposed>
Dump load_matrices_dump(const char* name) {
  const Words in(moved_words(256)), out(32 * kMatrices);
  run(load_matrices<kMatrices, kTransposed>, 1, 32, 512, out.get(), in.get());
  return {name, out.host()};
}

// ---- mma.sync

__global__ void multiply(float* out, const uint32_t* a, const uint32_t* b) {
  const unsigned lane = threadIdx.x;
  uint32_t left[4];
  for (int i = 0; i < 4; ++i) left[i] = a[4 * lane + i];
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(4 * lane + i);
  mma_16816(d, left, b[2 * lane], b[2 * lane + 1]);
  for (int i = 0; i < 4; ++i) out[4 * lane + i] = d[i];
}

__global__ void pack_factors(uint32_t* out, int second) {
  const int i = static_cast<int>(threadIdx.x);
  out[i] =
      second ? pack_bf16(static_cast<float>(other_factor(2 * i)), static_cast<float>(other_factor(2 * i + 1)))
             : pack_bf16(static_cast<float>(factor(2 * i)), static_cast<float>(factor(2 * i + 1)));
}

Dump multiply_dump() {
  const Words a(128), b(64), out(128);
  run(pack_factors, 1, 128, 0, a.get(), 0);
  run(pack_factors, 1, 64, 0, b.get(), 1);
  run(multiply, 1, 32, 0, reinterpret_cast<float*>(out.get()), a.get(), b.get());
  return {"mma_16816", out.host()};
}

__global__ void pack(uint32_t* out) {
  out[threadIdx.x] =
      pack_bf16(1.0f + static_cast<float>(threadIdx.x) / 256.0f, -static_cast<float>(threadIdx.x));
}

Dump pack_dump() {
  const Words out(32);
  run(pack, 1, 32, 0, out.get());
  return {"pack_bf16", out.host()};
}

// ---- cp.async: 16 bytes per thread, zeros for odd ones, in two groups

__global__ void copy_async(uint32_t* out, const uint32_t* in) {
  DYN_SMEM(uint32_t, smem, 16);
  const unsigned tid = threadIdx.x;
  const uint32_t to = smem_addr(smem) + tid * 32;
  cp_async_16(to, in + tid * 8, tid % 2 == 0);
  cp_async_commit();
  cp_async_16(to + 16, in + tid * 8 + 4, true);
  cp_async_commit();
  cp_async_wait<1>();
  for (int i = 0; i < 4; ++i) out[tid * 8 + i] = smem[tid * 8 + i];
  cp_async_wait<0>();
  for (int i = 4; i < 8; ++i) out[tid * 8 + i] = smem[tid * 8 + i];
}

Dump copy_async_dump() {
  const Words in(moved_words(512)), out(256);
  run(copy_async, 1, 32, 1024, out.get(), in.get());
  return {"cp_async_16", out.host()};
}

// ---- named barriers: two warps write and go on, two wait and read

__global__ void hand_over(uint32_t* out) {
  STATIC_SMEM(uint32_t, values, [64]);
  const unsigned tid = threadIdx.x;
  if (tid < 64) {
    values[tid] = 3 * tid;
    named_barrier_arrive<2>(128);
  } else {
    named_barrier_sync<2>(128);
    out[tid - 64] = values[tid - 64];
    named_barrier_sync<3>(64);
  }
}

Dump hand_over_dump() {
  const Words out(64);
  run(hand_over, 1, 128, 0, out.get());
  return {"named_barrier", out.host()};
}

// ---- release and acquire: the block that has taken number b waits for that with b - 1

__global__ void relay(uint32_t* out, int* flags) {
  if (threadIdx.x != 0) return;
  const int b = atomicAdd(flags + gridDim.x, 1);
  uint32_t value = 1;
  if (b > 0) {
    spin_until([&] { return load_acquire(flags + b - 1) == 1; });
    value = 3 * out[b - 1];
  }
  out[b] = value;
  store_release(flags + b, 1);
}

Dump relay_dump() {
  const Words out(8), flags(std::vector<uint32_t>(9, 0));
  run(relay, 8, 32, 0, out.get(), reinterpret_cast<int*>(flags.get()));
  return {"load_acquire, store_release, spin_until", out.host()};
}

// ---- approximate functions

template <bool kLog>
__global__ void exponents(float* out) {
  const int i = static_cast<int>(threadIdx.x);
  out[i] = kLog ? lg2(static_cast<float>(i + 3) * 0.37f) : ex2(static_cast<float>(i - 64) * 0.31f);
}

template <bool kLog>
Dump exponents_dump(const char* name) {
  const Words out(128);
  run(exponents<kLog>, 1, 128, 0, reinterpret_cast<float*>(out.get()));
  return {name, out.host(), true};
}

}  // namespace

std::vector<Dump> run_ampere() {
  return {load_matrices_dump<4, false>("ldmatrix_x4"),
          load_matrices_dump<4, true>("ldmatrix_x4_trans"),
          load_matrices_dump<2, false>("ldmatrix_x2"),
          load_matrices_dump<2, true>("ldmatrix_x2_trans"),
          multiply_dump(),
          pack_dump(),
          copy_async_dump(),
          hand_over_dump(),
          relay_dump(),
          exponents_dump<false>("ex2"),
          exponents_dump<true>("lg2")};
}

}  // namespace sluice::conformance
