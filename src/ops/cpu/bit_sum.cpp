#include "ops/bit_sum.h"

#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

inline uint64_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
inline uint64_t bits_of(bf16 x) { return x.bits; }
inline uint64_t bits_of(double x) { return std::bit_cast<uint64_t>(x); }

void bit_sum(Context& ctx, Tensor sum, const Tensor& x, int64_t first, uint64_t seed) {
  if (ctx.dry_run) return;
  std::atomic<uint64_t> total{0};
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* p = x.as<T>();
    parallel_for(x.numel(), 16384, [&](int64_t begin, int64_t end) {
      uint64_t mine = 0;
#pragma omp simd reduction(+ : mine)
      for (int64_t i = begin; i < end; ++i) mine += bit_term(seed, first + i, bits_of(p[i]));
      total += mine;
    });
  });
  const uint64_t result = total;
  std::memcpy(sum.data, &result, sizeof result);
}

void word_sum(Context& ctx, Tensor sum, const Tensor& x) {
  if (ctx.dry_run) return;
  std::atomic<uint32_t> total{static_cast<uint32_t>(*sum.as<int32_t>())};
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* p = x.as<T>();
    parallel_for(x.numel(), 16384, [&, p](int64_t begin, int64_t end) {
      uint32_t mine = 0;
#pragma omp simd reduction(+ : mine)
      for (int64_t i = begin; i < end; ++i) mine += word_bits(p[i]);
      total += mine;
    });
  });
  *sum.as<int32_t>() = static_cast<int32_t>(total.load());
}

#include "ops/cpu/isa_end.h"
