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

/// e^x, relative error below 2e-7 over the finite range; 0 below -87.3, +inf above 88.7; NaN stays NaN.
/// Cody-Waite reduction by ln 2 and a degree-6 polynomial of the remainder on [-ln2/2, ln2/2].
inline float exp_fast(float x) {
  const float clamped = std::min(std::max(x, -87.3f), 88.7f);  // NaN: max returns its first argument's order below
  const float n = std::nearbyint(clamped * 1.44269504088896341f);
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t k = static_cast<int32_t>(n);
  // Two halves, so that n = 128 does not overflow the exponent before the product does.
  const float a = std::bit_cast<float>((k / 2 + 127) << 23), b = std::bit_cast<float>((k - k / 2 + 127) << 23);
  const float y = p * a * b;
  return x < -87.3f ? 0.0f : x > 88.7f ? std::numeric_limits<float>::infinity() : x != x ? x : y;
}
inline double exp_fast(double x) { return std::exp(x); }

template <class A>
inline A sigmoid(A x) {
  return A(1) / (A(1) + exp_fast(-x));
}
