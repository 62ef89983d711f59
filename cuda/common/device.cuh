#pragma once
// The header that kernels include in addition to ptx.cuh. The same source is compiled by nvcc for a GPU and,
// with SLUICE_EMULATION defined, by g++ for the emulator in tests/emulation.
//
// Restrictions on kernels (reasons: tests/emulation/README.md):
// - shared memory only through STATIC_SMEM, STATIC_SMEM_16 (aligned to 16 bytes, for vectors) and DYN_SMEM,
// 32-bit shared addresses only through smem_addr (ptx.cuh);
// - launches only through launch(); no inline assembly, no cooperative groups, no CUB;
// - every thread of a block reaches the same __syncthreads; no return before a barrier;
// - waiting only through the wrappers of ptx.cuh and spin_until; between blocks only on
// blocks that have taken a lower number from a counter;
// - __syncwarp wherever lanes exchange data through shared memory;
// - vector access through types with their alignment (float4, Vec<T, N>).
#ifdef SLUICE_EMULATION
#include "emulation.h"
#define STATIC_SMEM(T, name, ...) \
  static char name##_tag_;        \
  auto& name = *(T(*) __VA_ARGS__)::emu::static_smem(&name##_tag_, sizeof(T __VA_ARGS__), alignof(T))
#define STATIC_SMEM_16(T, name, ...) \
  static char name##_tag_;           \
  auto& name = *(T(*) __VA_ARGS__)::emu::static_smem(&name##_tag_, sizeof(T __VA_ARGS__), 16)
#define DYN_SMEM(T, name, alignment) T* name = (T*)::emu::dyn_smem(alignment)
#else
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#define STATIC_SMEM(T, name, ...) __shared__ T name __VA_ARGS__
#define STATIC_SMEM_16(T, name, ...) __shared__ __align__(16) T name __VA_ARGS__
#define DYN_SMEM(T, name, alignment)                           \
  extern __shared__ __align__(1024) unsigned char dyn_smem_[]; \
  T* name = reinterpret_cast<T*>(dyn_smem_)
#endif

#include <cstdint>

#define DEVICE_INLINE __device__ __forceinline__

namespace sluice::cuda {

using nv_bf16 = __nv_bfloat16;
using nv_bf162 = __nv_bfloat162;

constexpr unsigned kFullWarp = 0xffffffffu;

// ---- element types: storage T is float or nv_bf16, arithmetic is float

DEVICE_INLINE float to_float(float x) { return x; }
DEVICE_INLINE float to_float(nv_bf16 x) { return __bfloat162float(x); }
template <class T>
DEVICE_INLINE T from_float(float x) {
  if constexpr (sizeof(T) == 4)
    return x;
  else
    return __float2bfloat16_rn(x);
}

/// N elements, loaded and stored in one access if they fill 16, 8 or 4 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Vec {
  T v[N];
};
/// 16 bytes worth of T.
template <class T>
constexpr int kVecWidth = 16 / static_cast<int>(sizeof(T));
template <class T>
using Vec16 = Vec<T, kVecWidth<T>>;

template <int N, class T>
DEVICE_INLINE Vec<T, N> load_vec(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <int N, class T>
DEVICE_INLINE void store_vec(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

/// The elements of a vector as floats, and back. Two bf16 share a word: taken by words, a conversion to float
/// is one instruction each and one back for two of them, less than half of what single elements take.
template <class T, int N>
DEVICE_INLINE void to_floats(float (&to)[N], const Vec<T, N>& from) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    uint32_t words[N / 2];
    __builtin_memcpy(words, from.v, sizeof words);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      to[2 * i] = __uint_as_float(words[i] << 16);
      to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = to_float(from.v[i]);
  }
}
template <class T, int N>
DEVICE_INLINE Vec<T, N> from_floats(const float (&from)[N]) {
  Vec<T, N> to;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const nv_bf162 pair = __floats2bfloat162_rn(from[i], from[i + 1]);
      to.v[i] = pair.x, to.v[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to.v[i] = from_float<T>(from[i]);
  }
  return to;
}

// ---- reductions in a warp: every lane gets the result

DEVICE_INLINE float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(kFullWarp, v, offset);
  return v;
}
DEVICE_INLINE double warp_sum(double v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(kFullWarp, v, offset);
  return v;
}
DEVICE_INLINE float warp_max(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, offset));
  return v;
}

/// Sum over a block of kThreads in a deterministic order; every thread gets the result. Uses two barriers;
/// may be called again immediately.
template <int kThreads, class A>
DEVICE_INLINE A block_sum(A v) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024);
  STATIC_SMEM(A, partial, [kThreads / 32]);
  v = warp_sum(v);
  __syncthreads();  // partial may still be read by the previous call
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  A total = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) total += partial[i];
  return total;
}

}  // namespace sluice::cuda
