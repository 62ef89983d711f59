// Elementwise; bound by memory and by exp. `omp simd` declares iterations independent, which is true for the
// aliasing that the header allows (same index); otherwise a run-time alias check would send in-place calls to
// scalar code.
#include "ops/activation.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel_for.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

void silu_forward(Context& ctx, Tensor y, const Tensor& x) {
  if (ctx.dry_run) return;
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* xp = x.as<T>();
    T* yp = y.as<T>();
    parallel_for(x.numel(), 8192, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const A v = load(xp + i);
        store(yp + i, v * sigmoid(v));
      }
    });
  });
}

void silu_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x) {
  if (ctx.dry_run) return;
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* xp = x.as<T>();
    const T* dyp = dy.as<T>();
    T* dxp = dx.as<T>();
    parallel_for(x.numel(), 8192, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const A v = load(xp + i), s = sigmoid(v);
        store(dxp + i, load(dyp + i) * s * (A(1) + v * (A(1) - s)));
      }
    });
  });
}

/// NaN passes through.
void squared_relu_forward(Context& ctx, Tensor y, const Tensor& x) {
  if (ctx.dry_run) return;
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* xp = x.as<T>();
    T* yp = y.as<T>();
    parallel_for(x.numel(), 8192, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const A v = load(xp + i), positive = v < A(0) ? A(0) : v;
        store(yp + i, positive * positive);
      }
    });
  });
}

void squared_relu_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x) {
  if (ctx.dry_run) return;
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const T* xp = x.as<T>();
    const T* dyp = dy.as<T>();
    T* dxp = dx.as<T>();
    parallel_for(x.numel(), 8192, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        const A v = load(xp + i), positive = v < A(0) ? A(0) : v;
        store(dxp + i, load(dyp + i) * (positive + positive));
      }
    });
  });
}

void swiglu_forward(Context& ctx, Tensor y, const Tensor& gate_up) {
  if (ctx.dry_run) return;
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const int64_t width = y.dim(1);
    parallel_for(y.dim(0), 8192 / std::max<int64_t>(width, 1), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* gate = gate_up.as<T>() + t * 2 * width;
        const T* up = gate + width;
        T* out = y.as<T>() + t * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
          const A g = load(gate + i);
          store(out + i, g * sigmoid(g) * load(up + i));
        }
      }
    });
  });
}

void swiglu_backward(Context& ctx, Tensor dgate_up, const Tensor& dy, const Tensor& gate_up) {
  if (ctx.dry_run) return;
  with_storage_type(dy.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const int64_t width = dy.dim(1);
    parallel_for(dy.dim(0), 8192 / std::max<int64_t>(width, 1), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* gate = gate_up.as<T>() + t * 2 * width;
        const T* up = gate + width;
        const T* dout = dy.as<T>() + t * width;
        T* dgate = dgate_up.as<T>() + t * 2 * width;
        T* dup = dgate + width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
          const A g = load(gate + i), u = load(up + i), d = load(dout + i), s = sigmoid(g);
          store(dgate + i, d * u * s * (A(1) + g * (A(1) - s)));
          store(dup + i, d * g * s);
        }
      }
    });
  });
}

void weighted_swiglu_forward(Context& ctx, Tensor y, const Tensor& gate_up, const Tensor& weights,
                             const Tensor& slots) {
  if (ctx.dry_run) return;
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const int64_t width = y.dim(1);
    parallel_for(y.dim(0), 8192 / std::max<int64_t>(width, 1), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* gate = gate_up.as<T>() + r * 2 * width;
        const T* up = gate + width;
        const A weight = weights.as<A>()[slots.as<int32_t>()[r]];
        T* out = y.as<T>() + r * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
          const A g = load(gate + i);
          store(out + i, weight * (g * sigmoid(g) * load(up + i)));
        }
      }
    });
  });
}

void weighted_swiglu_backward(Context& ctx, Tensor dgate_up, Tensor dweights, const Tensor& dy,
                              const Tensor& gate_up, const Tensor& weights, const Tensor& slots) {
  if (ctx.dry_run) return;
  with_storage_type(dy.dtype, [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const int64_t width = dy.dim(1);
    parallel_for(dy.dim(0), 8192 / std::max<int64_t>(width, 1), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* gate = gate_up.as<T>() + r * 2 * width;
        const T* up = gate + width;
        const T* dout = dy.as<T>() + r * width;
        T* dgate = dgate_up.as<T>() + r * 2 * width;
        T* dup = dgate + width;
        const int32_t slot = slots.as<int32_t>()[r];
        const A weight = weights.as<A>()[slot];
        A dweight = 0;
#pragma omp simd reduction(+ : dweight)
        for (int64_t i = 0; i < width; ++i) {
          const A g = load(gate + i), u = load(up + i), d = load(dout + i), s = sigmoid(g), wd = weight * d;
          dweight += d * (g * s * u);
          store(dgate + i, wd * u * s * (A(1) + g * (A(1) - s)));
          store(dup + i, wd * g * s);
        }
        dweights.as<A>()[slot] = dweight;
      }
    });
  });
}

#include "ops/cpu/isa_end.h"
