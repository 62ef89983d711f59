// Bound by memory. `omp simd` holds for the aliasing the header allows (same index).
#include "ops/elementwise.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/parallel_for.h"
#include "ops/stochastic_bits.h"

// In this order.
// clang-format off
#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/vectors.h"
#include "ops/cpu/soft_cap.h"
// clang-format on

constexpr int64_t kGrain = 16384;

void add_forward(Context& ctx, Tensor y, const Tensor& a, const Tensor& b) {
  if (ctx.dry_run) return;
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    const T *ap = a.as<T>(), *bp = b.as<T>();
    T* yp = y.as<T>();
    parallel_for(y.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for_vectors<accumulate_t<T>>(end - begin, [&](int64_t i, int64_t n) {
        put(yp + begin + i, take(ap + begin + i, n) + take(bp + begin + i, n), n);
      });
    });
  });
}

void clip_forward(Context& ctx, Tensor y, const Tensor& x, double limit) {
  if (ctx.dry_run) return;
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* xp = x.as<T>();
    T* yp = y.as<T>();
    const A c = static_cast<A>(limit);
    parallel_for(y.numel(), kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const A v = load(xp + i);
        store(yp + i, v > c ? c : v < -c ? -c : v);  // NaN passes both comparisons and stays
      }
    });
  });
}

void clip_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, double limit) {
  if (ctx.dry_run) return;
  with_storage_type(dx.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T *xp = x.as<T>(), *dyp = dy.as<T>();
    T* dxp = dx.as<T>();
    const A c = static_cast<A>(limit);
    parallel_for(dx.numel(), kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const A v = load(xp + i), d = load(dyp + i);
        store(dxp + i, v > -c && v < c ? d : A(0));
      }
    });
  });
}

void soft_cap_forward(Context& ctx, Tensor y, const Tensor& x, double cap) {
  if (ctx.dry_run) return;
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* xp = x.as<T>();
    T* yp = y.as<T>();
    const A c = static_cast<A>(cap), inverse = static_cast<A>(1 / cap);
    parallel_for(y.numel(), kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) store(yp + i, soft_cap<A>(load(xp + i), c, inverse));
    });
  });
}

/// Nearest even from double in one rounding: the float in between is rounded to odd (Boldo & Melquiond 2008),
/// which keeps on which side of a bf16 tie the number lies.
inline bf16 nearest_bf16(double x) {
  const float nearest = static_cast<float>(x);
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if (static_cast<double>(nearest) != x && x == x) {
    if (std::abs(static_cast<double>(nearest)) > std::abs(x)) --bits;  // back towards zero
    bits |= 1u;
  }
  return bf16(std::bit_cast<float>(bits));
}

template <class To, class From>
inline void convert(To* y, From x) {
  if constexpr (std::is_same_v<To, bf16> && std::is_same_v<From, double>) {
    *y = nearest_bf16(x);
  } else {
    store(y, static_cast<accumulate_t<To>>(x));
  }
}

void cast(Context& ctx, Tensor y, const Tensor& x) {
  if (ctx.dry_run) return;
  with_storage_type(x.dtype, [&](auto from) {
    with_storage_type(y.dtype, [&](auto to) {
      const auto* xp = x.as<decltype(from)>();
      auto* yp = y.as<decltype(to)>();
      parallel_for(y.numel(), kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) convert(yp + i, load(xp + i));
      });
    });
  });
}

void round_stochastically(Context& ctx, Tensor y, const Tensor& x, uint32_t key) {
  if (ctx.dry_run) return;
  bf16* to = y.as<bf16>();
  const float* from = x.as<float>();
  parallel_for(y.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      to[i].bits = stochastic_bf16(std::bit_cast<uint32_t>(from[i]), static_cast<uint32_t>(i), key);
  });
}

void fill(Context& ctx, Tensor y, double value) {
  if (ctx.dry_run) return;
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    T element;
    convert(&element, value);
    parallel_for(y.numel(), kGrain,
                 [&](int64_t begin, int64_t end) { std::fill(y.as<T>() + begin, y.as<T>() + end, element); });
  });
}

void scale(Context& ctx, Tensor y, double factor) {
  if (ctx.dry_run) return;
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    T* yp = y.as<T>();
    const A f = static_cast<A>(factor);
    parallel_for(y.numel(), kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) store(yp + i, load(yp + i) * f);
    });
  });
}

#include "ops/cpu/isa_end.h"
