// Building blocks of the CPU kernels: element loads and stores, and exp written so that compilers vectorise
// it. Include between isa_begin.h and isa_end.h (it is compiled for that instruction set), after <cmath> and
// core/dtype.h.

inline float load(const float* p) { return *p; }
inline double load(const double* p) { return *p; }
inline float load(const bf16* p) { return std::bit_cast<float>(static_cast<uint32_t>(p->bits) << 16); }
inline void store(float* p, float x) { *p = x; }
inline void store(double* p, double x) { *p = x; }
inline void store(bf16* p, float x) {
  // bf16(float) without its branch: select, so that loops of stores vectorise.
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u), nan = u | 0x400000u;
  p->bits = static_cast<uint16_t>((x != x ? nan : rounded) >> 16);
}

/// e^x = 2^n e^r for x in [-86.9, 89] (NaN stays NaN), as 2^(n-1), a normal number, and e^r.
/// Cody-Waite reduction by ln 2 and the degree-6 polynomial of the remainder whose largest relative error on
/// [-ln2/2, ln2/2] is least (4e-9).
/// V is float, or a vector of them (vectors.h), whose bits are Words.
template <class V>
struct ExpParts {
  V half_scale, mantissa;
};
template <class V, class Words>
[[gnu::always_inline]] inline ExpParts<V> exp_parts(V x) {
  // Adding 1.5 * 2^23 rounds to the nearest integer in every instruction set (nearbyint is a call below
  // SSE4.1) and leaves that integer in the low bits, from where one shift moves it into an exponent.
  const V shifted = x * 1.44269504088896341f + 12582912.0f;
  const V n = shifted - 12582912.0f;
  const V r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  V p = 1.3814599185e-3f * r + 8.3687169312e-3f;
  p = p * r + 4.1668388046e-2f;
  p = p * r + 1.6666520631e-1f;
  p = p * r + 4.9999993448e-1f;
  p = p * r * r + r + 1.0f;
  // std::bit_cast would be a function of another instruction set.
  return {__builtin_bit_cast(V, (__builtin_bit_cast(Words, shifted) << 23) + 0x3f000000u), p};
}

/// e^x, relative error below 1.5e-7 over the finite range; 0 below -86.9 (no denormals), +inf above 88.73;
/// NaN stays NaN.
inline float exp_fast(float x) {
  // The order of the arguments lets NaN through. Beyond 88.72 the product overflows by itself.
  const auto e = exp_parts<float, uint32_t>(std::min(std::max(x, -86.9f), 89.0f));
  const float y = e.half_scale * (e.mantissa + e.mantissa);
  // A mask instead of a branch: branches in the scalar remainder of a loop would keep GCC from contracting
  // multiplications and additions as in the vector body, and bits would depend on the partition of the work.
  const uint32_t keep = static_cast<uint32_t>(x < -86.9f) - 1u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(y) & keep);
}
inline double exp_fast(double x) { return std::exp(x); }

/// 1 / (1 + e^-x): 0 below -88.73, 1 from 17 on; NaN stays NaN. Without branches, for the same reason.
inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline float sigmoid(float x) {
  const auto e = exp_parts<float, uint32_t>(std::min(std::max(-x, -86.9f), 89.0f));
  return 1.0f / (e.half_scale * (e.mantissa + e.mantissa) + 1.0f);
}

/// Calls f(T{}) with the storage type of dtype, which the op's entry point has checked to be one of the
/// three.
template <class F>
inline void with_storage_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(bf16{});
    case DType::f64:
      return f(double{});
    case DType::i32:
    case DType::u8:
      break;
  }
  __builtin_trap();
}
