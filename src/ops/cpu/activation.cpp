// Elementwise; bound by memory and by exp. `omp simd` declares iterations independent, which is true for the
// aliasing that the header allows (same index); otherwise a run-time alias check would send in-place calls to
// scalar code.
#include "ops/activation.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/parallel_for.h"

// In this order.
// clang-format off
#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"
#include "ops/cpu/vectors.h"
// clang-format on

namespace {

/// silu(g) u, and its gradients with respect to g and u, times d. V is a number or a vector.
struct Swiglu {
  template <class V>
  V value(V g, V u) const {
    return g * sigmoids(g) * u;
  }
  template <class V>
  void backward(V d, V g, V u, V& dg, V& du) const {
    const V s = sigmoids(g);
    dg = d * u * s * (1.0f + g * (1.0f - s));
    du = d * g * s;
  }
};

/// g sigmoid(1.702 g) (u + 1) of g and u clamped at the limit. Selects, so that loops vectorise and NaN
/// passes.
template <class A>
struct ClampedSwiglu {
  A limit;
  static constexpr A kSlope = A(1.702);
  template <class V>
  V gate(V g) const {
    const V most = limit + V{};
    return g > most ? most : g;
  }
  template <class V>
  V up(V u) const {
    const V most = limit + V{};
    return (u > most ? most : u < -most ? -most : u) + 1.0f;
  }
  template <class V>
  V value(V g, V u) const {
    const V c = gate(g);
    return c * sigmoids(kSlope * c) * up(u);
  }
  template <class V>
  void backward(V d, V g, V u, V& dg, V& du) const {
    const V c = gate(g), s = sigmoids(kSlope * c), zero{}, most = limit + zero;
    dg = g > most ? zero : d * up(u) * s * (1.0f + kSlope * c * (1.0f - s));
    du = u > most ? zero : u < -most ? zero : d * c * s;
  }
};

/// Calls f with the form of SwiGLU.
template <class A, class F>
void with_swiglu(std::optional<double> limit, F&& f) {
  if (limit) return f(ClampedSwiglu<A>{static_cast<A>(*limit)});
  f(Swiglu{});
}

}  // namespace

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
    const int64_t width = y.dim(1);
    parallel_for(y.dim(0), 8192 / std::max<int64_t>(width, 1), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* gate = gate_up.as<T>() + t * 2 * width;
        const T* up = gate + width;
        T* out = y.as<T>() + t * width;
        for_elements<T>(width, [&](auto at) { at.set(out, Swiglu().value(at.get(gate), at.get(up))); });
      }
    });
  });
}

void swiglu_backward(Context& ctx, Tensor dgate_up, const Tensor& dy, const Tensor& gate_up) {
  if (ctx.dry_run) return;
  with_storage_type(dy.dtype, [&](auto tag) {
    using T = decltype(tag);
    const int64_t width = dy.dim(1);
    parallel_for(dy.dim(0), 8192 / std::max<int64_t>(width, 1), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* gate = gate_up.as<T>() + t * 2 * width;
        const T* up = gate + width;
        const T* dout = dy.as<T>() + t * width;
        T* dgate = dgate_up.as<T>() + t * 2 * width;
        T* dup = dgate + width;
        for_elements<T>(width, [&](auto at) {
          auto dg = at.get(gate), du = at.get(up);
          Swiglu().backward(at.get(dout), dg, du, dg, du);
          at.set(dgate, dg);
          at.set(dup, du);
        });
      }
    });
  });
}

namespace {

template <class T, class Form>
void weighted_forward(const Tensor& y, const Tensor& gate_up, const Tensor& weights, const Tensor& slots,
                      const Form& form) {
  using A = accumulate_t<T>;
  const int64_t width = y.dim(1);
  parallel_for(y.dim(0), 8192 / std::max<int64_t>(width, 1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* gate = gate_up.as<T>() + r * 2 * width;
      const T* up = gate + width;
      const A weight = weights.as<A>()[slots.as<int32_t>()[r]];
      T* out = y.as<T>() + r * width;
      for_elements<T>(width, [&](auto at) { at.set(out, weight * form.value(at.get(gate), at.get(up))); });
    }
  });
}

template <class T, class Form>
void weighted_backward(const Tensor& dgate_up, const Tensor& dweights, const Tensor& dy,
                       const Tensor& gate_up, const Tensor& weights, const Tensor& slots, const Form& form) {
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
        const A g = load(gate + i), u = load(up + i), d = load(dout + i);
        A dg, du;
        form.backward(weight * d, g, u, dg, du);
        dweight += d * form.value(g, u);
        store(dgate + i, dg);
        store(dup + i, du);
      }
      dweights.as<A>()[slot] = dweight;
    }
  });
}

}  // namespace

void weighted_swiglu_forward(Context& ctx, Tensor y, const Tensor& gate_up, const Tensor& weights,
                             const Tensor& slots, std::optional<double> limit) {
  if (ctx.dry_run) return;
  with_storage_type(y.dtype, [&](auto tag) {
    using T = decltype(tag);
    with_swiglu<accumulate_t<T>>(
        limit, [&](const auto& form) { weighted_forward<T>(y, gate_up, weights, slots, form); });
  });
}

void weighted_swiglu_backward(Context& ctx, Tensor dgate_up, Tensor dweights, const Tensor& dy,
                              const Tensor& gate_up, const Tensor& weights, const Tensor& slots,
                              std::optional<double> limit) {
  if (ctx.dry_run) return;
  with_storage_type(dy.dtype, [&](auto tag) {
    using T = decltype(tag);
    with_swiglu<accumulate_t<T>>(limit, [&](const auto& form) {
      weighted_backward<T>(dgate_up, dweights, dy, gate_up, weights, slots, form);
    });
  });
}

#include "ops/cpu/isa_end.h"
