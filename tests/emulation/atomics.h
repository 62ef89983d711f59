#pragma once
// CUDA's atomic functions: relaxed, as on a GPU. Included by emulation.h.

namespace emu {

/// Atomically replaces *p by change(*p); returns the old value.
template <class T, class Change>
T atomic_change(T* p, Change&& change) {
  using Bits =
      std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  static_assert(sizeof(T) == sizeof(Bits));
  Bits* address = reinterpret_cast<Bits*>(p);
  Bits seen = __atomic_load_n(address, __ATOMIC_RELAXED);
  for (;;) {
    const T before = from_bits<T>(seen);
    const Bits wanted = static_cast<Bits>(to_bits<T>(change(before)));
    if (__atomic_compare_exchange_n(address, &seen, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return before;
  }
}

}  // namespace emu

#define EMU_ATOMICS(T)                                                                       \
  inline T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }       \
  inline T atomicSub(T* p, T v) { return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED); }       \
  inline T atomicAnd(T* p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_RELAXED); }       \
  inline T atomicOr(T* p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }         \
  inline T atomicXor(T* p, T v) { return __atomic_fetch_xor(p, v, __ATOMIC_RELAXED); }       \
  inline T atomicExch(T* p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }     \
  inline T atomicCAS(T* p, T expected, T v) {                                                \
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
    return expected;                                                                         \
  }                                                                                          \
  inline T atomicMin(T* p, T v) {                                                            \
    return ::emu::atomic_change(p, [v](T x) { return v < x ? v : x; });                      \
  }                                                                                          \
  inline T atomicMax(T* p, T v) {                                                            \
    return ::emu::atomic_change(p, [v](T x) { return x < v ? v : x; });                      \
  }
EMU_ATOMICS(int)
EMU_ATOMICS(unsigned)
EMU_ATOMICS(long long)
EMU_ATOMICS(unsigned long long)
#undef EMU_ATOMICS

inline unsigned atomicInc(unsigned* p, unsigned limit) {
  return ::emu::atomic_change(p, [limit](unsigned x) { return x >= limit ? 0u : x + 1; });
}
inline unsigned atomicDec(unsigned* p, unsigned limit) {
  return ::emu::atomic_change(p, [limit](unsigned x) { return x == 0 || x > limit ? limit : x - 1; });
}
inline float atomicExch(float* p, float v) {
  return ::emu::atomic_change(p, [v](float) { return v; });
}
inline float atomicAdd(float* p, float v) {
  return ::emu::atomic_change(p, [v](float x) { return x + v; });
}
inline double atomicAdd(double* p, double v) {
  return ::emu::atomic_change(p, [v](double x) { return x + v; });
}
inline __nv_bfloat16 atomicAdd(__nv_bfloat16* p, __nv_bfloat16 v) {
  return ::emu::atomic_change(p, [v](__nv_bfloat16 x) { return __hadd(x, v); });
}
inline __nv_bfloat162 atomicAdd(__nv_bfloat162* p, __nv_bfloat162 v) {
  return ::emu::atomic_change(p, [v](__nv_bfloat162 x) { return __hadd2(x, v); });
}
// Vectors (sm_90): atomic per element, not as a whole.
inline float2 atomicAdd(float2* p, float2 v) { return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y)}; }
inline float4 atomicAdd(float4* p, float4 v) {
  return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y), atomicAdd(&p->z, v.z), atomicAdd(&p->w, v.w)};
}
