// Memory-bound: one vectorised pass each (common/map.cuh). Not yet run on a GPU.
#include "common/map.cuh"
#include "common/soft_cap.cuh"
#include "ops/elementwise.h"
#include "ops/stochastic_bits.h"

namespace sluice::cuda {
namespace {

struct Add {
  DEVICE_INLINE float operator()(float a, float b) const { return a + b; }
};
struct Clip {
  float limit;
  // NaN fails both comparisons and passes through.
  DEVICE_INLINE float operator()(float x) const { return x > limit ? limit : x < -limit ? -limit : x; }
};
struct ClipBackward {
  float limit;
  DEVICE_INLINE float operator()(float dy, float x) const { return x > -limit && x < limit ? dy : 0.f; }
};
struct SoftCap {
  float cap, inverse;
  DEVICE_INLINE float operator()(float x) const { return soft_cap(x, cap, inverse); }
};
struct Same {
  DEVICE_INLINE float operator()(float x) const { return x; }
};
struct Scale {
  float factor;
  DEVICE_INLINE float operator()(float x) const { return x * factor; }
};

template <class T>
struct Fill {
  static constexpr int kWidth = kVecWidth<T>, kUnroll = 4;
  T* y;
  T value;
  template <int N>
  struct In {};
  template <int N>
  DEVICE_INLINE In<N> load(int64_t) const {
    return {};
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>&) const {
    Vec<T, N> out;
#pragma unroll
    for (int e = 0; e < N; ++e) out.v[e] = value;
    store_vec<N>(y + i, out);
  }
};

struct RoundStochastically {
  static constexpr int kWidth = kVecWidth<nv_bf16>, kUnroll = 2;
  nv_bf16* y;
  const float* x;
  uint32_t key;
  template <int N>
  using In = Vec<float, N>;
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    return load_vec<N>(x + i);
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    Vec<nv_bf16, N> out;
#pragma unroll
    for (int e = 0; e < N; ++e)
      out.v[e] =
          __ushort_as_bfloat16(stochastic_bf16(__float_as_uint(in.v[e]), static_cast<uint32_t>(i + e), key));
    store_vec<N>(y + i, out);
  }
};

template <class T>
void fill_with(Context& ctx, const Tensor& y, T value) {
  T* const out = device_data<T>(y);
  map(ctx, "fill", Fill<T>{out, value}, y.numel(), aligned(out));
}

}  // namespace

void add_forward(Context& ctx, Tensor y, const Tensor& a, const Tensor& b) {
  if (ctx.dry_run) return;
  dispatch_storage("add_forward", y, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    map_binary(ctx, "add_forward", device_data<T>(y), device_data<T>(a), device_data<T>(b), y.numel(), Add{});
  });
}

void clip_forward(Context& ctx, Tensor y, const Tensor& x, double limit) {
  if (ctx.dry_run) return;
  dispatch_storage("clip_forward", y, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    map_unary(ctx, "clip_forward", device_data<T>(y), device_data<T>(x), y.numel(),
              Clip{static_cast<float>(limit)});
  });
}

void clip_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, double limit) {
  if (ctx.dry_run) return;
  dispatch_storage("clip_backward", dx, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    map_binary(ctx, "clip_backward", device_data<T>(dx), device_data<T>(dy), device_data<T>(x), dx.numel(),
               ClipBackward{static_cast<float>(limit)});
  });
}

void soft_cap_forward(Context& ctx, Tensor y, const Tensor& x, double cap) {
  if (ctx.dry_run) return;
  dispatch_storage("soft_cap_forward", y, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    map_unary(ctx, "soft_cap_forward", device_data<T>(y), device_data<T>(x), y.numel(),
              SoftCap{static_cast<float>(cap), static_cast<float>(1 / cap)});
  });
}

void cast(Context& ctx, Tensor y, const Tensor& x) {
  if (ctx.dry_run) return;
  dispatch_storage("cast", x, [&](auto* from) {
    dispatch_storage("cast", y, [&](auto* to) {
      using From = std::remove_pointer_t<decltype(from)>;
      using To = std::remove_pointer_t<decltype(to)>;
      To* const yp = device_data<To>(y);
      const From* const xp = device_data<From>(x);
      map(ctx, "cast", UnaryMap<Same, To, From>{yp, xp, {}}, y.numel(), aligned(yp, xp));
    });
  });
}

void round_stochastically(Context& ctx, Tensor y, const Tensor& x, uint32_t key) {
  if (ctx.dry_run) return;
  nv_bf16* const to = device_data<nv_bf16>(y);
  const float* const from = device_data<float>(x);
  map(ctx, "round_stochastically", RoundStochastically{to, from, key}, y.numel(), aligned(to, from));
}

void fill(Context& ctx, Tensor y, double value) {
  if (ctx.dry_run) return;
  if (y.dtype == DType::f64) return fill_with<double>(ctx, y, value);  // scalars of the step
  dispatch_storage("fill", y, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if constexpr (sizeof(T) == 4)
      fill_with<T>(ctx, y, static_cast<float>(value));
    else
      fill_with<T>(ctx, y, __double2bfloat16(value));  // one rounding, to nearest even
  });
}

void scale(Context& ctx, Tensor y, double factor) {
  if (ctx.dry_run) return;
  dispatch_storage("scale", y, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    T* const p = device_data<T>(y);
    map_unary(ctx, "scale", p, static_cast<const T*>(p), y.numel(), Scale{static_cast<float>(factor)});
  });
}

}  // namespace sluice::cuda
