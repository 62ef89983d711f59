// Building blocks of the CPU kernels: element loads and stores, and exp written so that compilers vectorise it.
// Include between isa_begin.h and isa_end.h (it is compiled for that instruction set), after <cmath> and core/dtype.h.

inline float load(const float* p) { return *p; }
inline double load(const double* p) { return *p; }
inline float load(const bf16* p) { return std::bit_cast<float>(static_cast<uint32_t>(p->bits) << 16); }
inline void store(float* p, float x) { *p = x; }
inline void store(double* p, double x) { *p = x; }
inline void store(bf16* p, float x) {
  // bf16(float) without its branch: select, so that loops of stores vectorise.
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;
  p->bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

/// e^x, relative error below 1.5e-7 over the finite range; 0 below -87.3, +inf above 88.7; NaN stays NaN.
/// Cody-Waite reduction by ln 2 and the degree-6 polynomial of the remainder whose largest
/// relative error on [-ln2/2, ln2/2] is least (4e-9).
inline float exp_fast(float x) {
  // The bound comes first: max(a, NaN) is a, so that no NaN reaches the conversion to an integer.
  const float clamped = std::min(std::max(-87.3f, x), 88.7f);
  // Adding 1.5 * 2^23 rounds to the nearest integer in every instruction set; nearbyint is a call below SSE4.1.
  const float n = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.3814599185e-3f;
  p = p * r + 8.3687169312e-3f;
  p = p * r + 4.1668388046e-2f;
  p = p * r + 1.6666520631e-1f;
  p = p * r + 4.9999993448e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t k = static_cast<int32_t>(n);
  // Two halves, so that n = 128 does not overflow the exponent before the product does.
  const int32_t half = k >> 1;
  const float a = std::bit_cast<float>((half + 127) << 23), b = std::bit_cast<float>((k - half + 127) << 23);
  const float y = p * a * b;
  return x < -87.3f ? 0.0f : x > 88.7f ? std::numeric_limits<float>::infinity() : x != x ? x : y;
}
inline double exp_fast(double x) { return std::exp(x); }

template <class A>
inline A sigmoid(A x) {
  return A(1) / (A(1) + exp_fast(-x));
}

/// Calls f(T{}) with the storage type of dtype, which the op's door has checked to be one of the three.
template <class F>
inline void with_storage_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(bf16{});
    default: return f(double{});
  }
}
