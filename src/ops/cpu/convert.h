// Conversions between bf16 and f32 over threads, for products that compute in f32. Include between
// isa_begin.h and isa_end.h, after vector_math.h and core/parallel_for.h.

constexpr int64_t kConvertGrain = 16384;

inline void widen(float* to, const bf16* from, int64_t n) {
  parallel_for(n, kConvertGrain, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = load(from + i);
  });
}

/// to = from, or to += from with one rounding.
inline void narrow(bf16* to, const float* from, int64_t n, Into into) {
  parallel_for(n, kConvertGrain, [=](int64_t begin, int64_t end) {
    if (into == Into::add)
      for (int64_t i = begin; i < end; ++i) store(to + i, load(to + i) + from[i]);
    else
      for (int64_t i = begin; i < end; ++i) store(to + i, from[i]);
  });
}
