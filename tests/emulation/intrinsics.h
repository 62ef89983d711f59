#pragma once
// CUDA's built-in functions. Those of a block or a warp receive the caller's source line; approximate
// functions are exact here. Included by emulation.h.

// ---- block and warp
inline void __syncthreads(EMU_SITE) { ::emu::bar_sync(0, 0, site); }
inline int __syncthreads_count(int predicate, EMU_SITE) { return ::emu::bar_red(predicate, 0, site); }
inline int __syncthreads_and(int predicate, EMU_SITE) { return ::emu::bar_red(predicate, 1, site); }
inline int __syncthreads_or(int predicate, EMU_SITE) { return ::emu::bar_red(predicate, 2, site); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_SITE) { ::emu::warp_sync(mask, site); }

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMU_SITE) {
  return ::emu::from_bits<T>(
      ::emu::shfl(mask, ::emu::to_bits(value), ::emu::kShuffleIndex, lane, width, site));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {
  return ::emu::from_bits<T>(
      ::emu::shfl(mask, ::emu::to_bits(value), ::emu::kShuffleUp, static_cast<int>(delta), width, site));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_SITE) {
  return ::emu::from_bits<T>(
      ::emu::shfl(mask, ::emu::to_bits(value), ::emu::kShuffleDown, static_cast<int>(delta), width, site));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMU_SITE) {
  return ::emu::from_bits<T>(
      ::emu::shfl(mask, ::emu::to_bits(value), ::emu::kShuffleXor, lane_mask, width, site));
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_SITE) {
  return ::emu::vote(mask, predicate, 0, site);
}
inline int __any_sync(unsigned mask, int predicate, EMU_SITE) {
  return static_cast<int>(::emu::vote(mask, predicate, 1, site));
}
inline int __all_sync(unsigned mask, int predicate, EMU_SITE) {
  return static_cast<int>(::emu::vote(mask, predicate, 2, site));
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, EMU_SITE) {
  return static_cast<unsigned>(::emu::match_any(mask, ::emu::to_bits(value), site));
}

#define EMU_REDUCE(name, type, op)                                                         \
  inline type __reduce_##name##_sync(unsigned mask, type value, EMU_SITE) {                \
    return static_cast<type>(::emu::reduce(mask, static_cast<uint32_t>(value), op, site)); \
  }
EMU_REDUCE(add, unsigned, ::emu::kReduceAdd)
EMU_REDUCE(add, int, ::emu::kReduceAdd)
EMU_REDUCE(min, unsigned, ::emu::kReduceMin)
EMU_REDUCE(min, int, ::emu::kReduceSignedMin)
EMU_REDUCE(max, unsigned, ::emu::kReduceMax)
EMU_REDUCE(max, int, ::emu::kReduceSignedMax)
EMU_REDUCE(and, unsigned, ::emu::kReduceAnd)
EMU_REDUCE(or, unsigned, ::emu::kReduceOr)
EMU_REDUCE(xor, unsigned, ::emu::kReduceXor)
#undef EMU_REDUCE

inline unsigned __activemask() { return 1u << ::emu::g_cur->lane; }  // a lane must not rely on others
inline void __threadfence() { ::emu::thread_fence(); }
inline void __threadfence_block() { ::emu::thread_fence(); }
inline void __threadfence_system() { ::emu::thread_fence(); }
inline void __nanosleep(unsigned) { ::emu::yield(); }
[[noreturn]] inline void __trap() { ::emu::fail("__trap()"); }

// ---- loads and stores with a cache hint
#define EMU_LOAD(name) \
  template <class T>   \
  T name(const T* p) { \
    return *p;         \
  }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldlu)
EMU_LOAD(__ldcv)
#undef EMU_LOAD
#define EMU_STORE(name)      \
  template <class T>         \
  void name(T* p, T value) { \
    *p = value;              \
  }
EMU_STORE(__stwb)
EMU_STORE(__stcg)
EMU_STORE(__stcs)
EMU_STORE(__stwt)
#undef EMU_STORE

// ---- integers
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> (4 * i) & 15u, byte = bytes >> (8 * (nibble & 7u)) & 0xffu;
    result |= (nibble & 8u ? (byte & 0x80u ? 0xffu : 0u) : byte) << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31u));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

// ---- bits
inline float __int_as_float(int x) { return ::emu::from_bits<float>(static_cast<uint32_t>(x)); }
inline int __float_as_int(float x) { return static_cast<int>(::emu::to_bits(x)); }
inline float __uint_as_float(unsigned x) { return ::emu::from_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(::emu::to_bits(x)); }
inline double __longlong_as_double(long long x) { return ::emu::from_bits<double>(static_cast<uint64_t>(x)); }
inline long long __double_as_longlong(double x) { return static_cast<long long>(::emu::to_bits(x)); }

// ---- conversions
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(rintf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

// ---- mathematics
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline float fdividef(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
/// Hides a value from the compiler, which contracts: these three are never part of a fused multiply-add.
inline float apart(float x) {
  asm("" : "+x"(x));
  return x;
}
inline float __fadd_rn(float a, float b) { return apart(apart(a) + apart(b)); }
inline float __fsub_rn(float a, float b) { return apart(apart(a) - apart(b)); }
inline float __fmul_rn(float a, float b) { return apart(a * b); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }

template <class A, class B>
auto min(A a, B b)
    -> std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
auto max(A a, B b)
    -> std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// ---- bf16: cuda_bf16.h has these for the device only
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return __float2bfloat16_rn(fmaf(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c)));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
