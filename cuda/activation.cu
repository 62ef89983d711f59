// Bound by memory (SwiGLU backward: 3 reads and 2 writes of (T, F)); some 20 instructions per element leave
// most issue slots idle. Mapping: common/map.cuh. Not yet run on a GPU.
#include "common/map.cuh"
#include "common/math.cuh"
#include "ops/activation.h"

namespace sluice::cuda {
namespace {

struct Silu {
  DEVICE_INLINE float operator()(float x) const { return x * sigmoid(x); }
};
struct SiluBackward {
  DEVICE_INLINE float operator()(float dy, float x) const {
    const float s = sigmoid(x);
    return dy * s * (1.f + x * (1.f - s));
  }
};

/// Element i of (T, F) belongs to gate_up's element i + (i / F) F: rows are twice as long there.
template <class T>
struct Swiglu {
  static constexpr int kWidth = kVecWidth<T>, kUnroll = 2;
  T* y;
  const T* gate_up;
  int64_t width;
  Divider row = Divider(width);
  template <int N>
  struct In {
    Vec<T, N> gate, up;
  };
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    const T* gate = gate_up + i + row.quotient(i) * width;
    return {load_vec<N>(gate), load_vec<N>(gate + width)};
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    Vec<T, N> out;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float g = to_float(in.gate.v[e]);
      out.v[e] = from_float<T>(g * sigmoid(g) * to_float(in.up.v[e]));
    }
    store_vec<N>(y + i, out);
  }
};

template <class T>
struct SwigluBackward {
  static constexpr int kWidth = kVecWidth<T>, kUnroll = 2;
  T* dgate_up;  // may be gate_up: a thread has read its gate and up before it writes either
  const T *dy, *gate_up;
  int64_t width;
  Divider row = Divider(width);
  template <int N>
  struct In {
    Vec<T, N> dy, gate, up;
  };
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    const T* gate = gate_up + i + row.quotient(i) * width;
    return {load_vec<N>(dy + i), load_vec<N>(gate), load_vec<N>(gate + width)};
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    Vec<T, N> dgate, dup;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float d = to_float(in.dy.v[e]), g = to_float(in.gate.v[e]), u = to_float(in.up.v[e]),
                  s = sigmoid(g);
      dgate.v[e] = from_float<T>(d * u * s * (1.f + g * (1.f - s)));
      dup.v[e] = from_float<T>(d * g * s);
    }
    T* const out = dgate_up + i + row.quotient(i) * width;
    store_vec<N>(out, dgate);
    store_vec<N>(out + width, dup);
  }
};

}  // namespace

void silu_forward(Context& ctx, Tensor y, const Tensor& x) {
  if (ctx.dry_run) return;
  dispatch_storage("silu_forward", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    map_unary(ctx, "silu_forward", device_data<T>(y), device_data<T>(x), x.numel(), Silu{});
  });
}

void silu_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x) {
  if (ctx.dry_run) return;
  dispatch_storage("silu_backward", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    map_binary(ctx, "silu_backward", device_data<T>(dx), device_data<T>(dy), device_data<T>(x), x.numel(),
               SiluBackward{});
  });
}

void swiglu_forward(Context& ctx, Tensor y, const Tensor& gate_up) {
  if (ctx.dry_run) return;
  dispatch_storage("swiglu_forward", y, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const Swiglu<T> op = {device_data<T>(y), device_data<T>(gate_up), y.dim(1)};
    map(ctx, "swiglu_forward", op, y.numel(), aligned(op.y, op.gate_up) && op.width % op.kWidth == 0);
  });
}

void swiglu_backward(Context& ctx, Tensor dgate_up, const Tensor& dy, const Tensor& gate_up) {
  if (ctx.dry_run) return;
  dispatch_storage("swiglu_backward", dy, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const SwigluBackward<T> op = {device_data<T>(dgate_up), device_data<T>(dy), device_data<T>(gate_up),
                                  dy.dim(1)};
    map(ctx, "swiglu_backward", op, dy.numel(),
        aligned(op.dgate_up, op.dy, op.gate_up) && op.width % op.kWidth == 0);
  });
}

}  // namespace sluice::cuda
