// Memory-bound (SwiGLU backward: 3 reads and 2 writes of (T, F)); about 20 instructions per element leave
// most issue slots idle. Mapping: common/map.cuh; the weighted backward pass, which sums over a row, uses 8
// to 32 lanes per row. Not yet run on a GPU.
#include "common/math.cuh"
#include "common/rows.cuh"
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

struct SquaredRelu {
  DEVICE_INLINE float operator()(float x) const {
    const float positive = x < 0.f ? 0.f : x;  // NaN passes through
    return positive * positive;
  }
};
struct SquaredReluBackward {
  DEVICE_INLINE float operator()(float dy, float x) const { return dy * (x < 0.f ? 0.f : x + x); }
};

/// silu(g) u, and its gradients with respect to g and u, times d.
struct PlainForm {
  DEVICE_INLINE float value(float g, float u) const { return g * sigmoid(g) * u; }
  DEVICE_INLINE void backward(float d, float g, float u, float& dg, float& du) const {
    const float s = sigmoid(g);
    dg = d * u * s * (1.f + g * (1.f - s));
    du = d * g * s;
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
      out.v[e] = from_float<T>(PlainForm().value(to_float(in.gate.v[e]), to_float(in.up.v[e])));
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
      float dg, du;
      PlainForm().backward(to_float(in.dy.v[e]), to_float(in.gate.v[e]), to_float(in.up.v[e]), dg, du);
      dgate.v[e] = from_float<T>(dg);
      dup.v[e] = from_float<T>(du);
    }
    T* const out = dgate_up + i + row.quotient(i) * width;
    store_vec<N>(out, dgate);
    store_vec<N>(out + width, dup);
  }
};

/// g sigmoid(1.702 g) (u + 1) of g and u clamped at the limit; NaN passes through.
struct ClampedForm {
  float limit;
  static constexpr float kSlope = 1.702f;
  DEVICE_INLINE float gate(float g) const { return g > limit ? limit : g; }
  DEVICE_INLINE float up(float u) const { return (u > limit ? limit : u < -limit ? -limit : u) + 1.f; }
  DEVICE_INLINE float value(float g, float u) const {
    const float c = gate(g);
    return c * sigmoid(kSlope * c) * up(u);
  }
  DEVICE_INLINE void backward(float d, float g, float u, float& dg, float& du) const {
    const float c = gate(g), s = sigmoid(kSlope * c);
    dg = g > limit ? 0.f : d * up(u) * s * (1.f + kSlope * c * (1.f - s));
    du = u > limit || u < -limit ? 0.f : d * c * s;
  }
};

/// Calls f with the form of SwiGLU.
template <class F>
void with_form(std::optional<double> limit, F&& f) {
  if (limit) return f(ClampedForm{static_cast<float>(*limit)});
  f(PlainForm{});
}

/// Element i of row r is multiplied by weights[slots[r]].
template <class T, class Form>
struct WeightedSwiglu {
  static constexpr int kWidth = kVecWidth<T>, kUnroll = 2;
  T* y;
  const T* gate_up;
  const float* weights;
  const int* slots;
  int64_t width;
  Form form;
  Divider row = Divider(width);
  template <int N>
  struct In {
    Vec<T, N> gate, up;
    float weight;
  };
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    const int64_t r = row.quotient(i);
    const T* gate = gate_up + i + r * width;
    return {load_vec<N>(gate), load_vec<N>(gate + width), weights[slots[r]]};
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    Vec<T, N> out;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      out.v[e] = from_float<T>(in.weight * form.value(to_float(in.gate.v[e]), to_float(in.up.v[e])));
    }
    store_vec<N>(y + i, out);
  }
};

constexpr int kRowThreads = 256;

template <class T, class Form>
struct WeightedBackward {
  T* dgate_up;  // may be gate_up: a thread has read its gates and ups before it writes there
  float* dweights;
  const T *dy, *gate_up;
  const float* weights;
  const int* slots;
  int64_t rows, width;
  Form form;
};

/// kLanes threads process a row, each kV vectors at a time; all loads precede the first store.
template <class T, class Form, int kN, int kLanes, int kV>
__global__ void __launch_bounds__(kRowThreads, 2)
    weighted_swiglu_backward_kernel(WeightedBackward<T, Form> b) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes, vectors = static_cast<int>(b.width / kN);
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kRowThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
  const int mine = row < b.rows ? vectors : 0;  // every thread stays for the sum over its group
  const int slot = mine > 0 ? b.slots[row] : 0;
  const float weight = mine > 0 ? b.weights[slot] : 0.f;
  const T *const dy = b.dy + row * b.width, *const gate = b.gate_up + row * 2 * b.width;
  T* const dgate = b.dgate_up + row * 2 * b.width;
  float dweight = 0;
  for (int first = lane; first < mine; first += kLanes * kV) {
    Vec<T, kN> d[kV], g[kV], u[kV];
#pragma unroll
    for (int v = 0; v < kV; ++v) {
      const int i = first + v * kLanes;
      if (i < mine) {
        d[v] = load_vec<kN>(dy + i * kN);
        g[v] = load_vec<kN>(gate + i * kN);
        u[v] = load_vec<kN>(gate + b.width + i * kN);
      }
    }
#pragma unroll
    for (int v = 0; v < kV; ++v) {
      const int i = first + v * kLanes;
      if (i < mine) {
#pragma unroll
        for (int e = 0; e < kN; ++e) {
          const float de = to_float(d[v].v[e]), ge = to_float(g[v].v[e]), ue = to_float(u[v].v[e]);
          float dg, du;
          b.form.backward(weight * de, ge, ue, dg, du);
          dweight += de * b.form.value(ge, ue);
          g[v].v[e] = from_float<T>(dg);
          u[v].v[e] = from_float<T>(du);
        }
        store_vec<kN>(dgate + i * kN, g[v]);
        store_vec<kN>(dgate + b.width + i * kN, u[v]);
      }
    }
  }
  dweight = GroupSum<kRowThreads, kLanes>()(dweight);
  if (mine > 0 && lane == 0) b.dweights[slot] = dweight;
}

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

void squared_relu_forward(Context& ctx, Tensor y, const Tensor& x) {
  if (ctx.dry_run) return;
  dispatch_storage("squared_relu_forward", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    map_unary(ctx, "squared_relu_forward", device_data<T>(y), device_data<T>(x), x.numel(), SquaredRelu{});
  });
}

void squared_relu_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x) {
  if (ctx.dry_run) return;
  dispatch_storage("squared_relu_backward", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    map_binary(ctx, "squared_relu_backward", device_data<T>(dx), device_data<T>(dy), device_data<T>(x),
               x.numel(), SquaredReluBackward{});
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

void weighted_swiglu_forward(Context& ctx, Tensor y, const Tensor& gate_up, const Tensor& weights,
                             const Tensor& slots, std::optional<double> limit) {
  if (ctx.dry_run) return;
  dispatch_storage("weighted_swiglu_forward", y, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    with_form(limit, [&](auto form) {
      const WeightedSwiglu<T, decltype(form)> op = {device_data<T>(y),
                                                    device_data<T>(gate_up),
                                                    device_data<float>(weights),
                                                    device_data<int>(slots),
                                                    y.dim(1),
                                                    form};
      map(ctx, "weighted_swiglu_forward", op, y.numel(),
          aligned(op.y, op.gate_up) && op.width % op.kWidth == 0);
    });
  });
}

namespace {

template <class T, class Form>
void run_weighted_backward(Context& ctx, const WeightedBackward<T, Form>& b) {
  constexpr int kN = kVecWidth<T>;
  const auto run = [&](int lanes, auto kernel) {
    launch(ctx, "weighted_swiglu_backward",
           {.grid = dim3(blocks_for(b.rows, kRowThreads / lanes)), .block = dim3(kRowThreads)}, kernel, b);
  };
  if (b.width % kN != 0 || !aligned(b.dgate_up, b.dy, b.gate_up))
    return run(32, weighted_swiglu_backward_kernel<T, Form, 1, 32, 4>);
  const int64_t vectors = b.width / kN;
  if (vectors <= 8) return run(8, weighted_swiglu_backward_kernel<T, Form, kN, 8, 1>);
  if (vectors <= 32) return run(32, weighted_swiglu_backward_kernel<T, Form, kN, 32, 1>);
  if (vectors <= 64) return run(32, weighted_swiglu_backward_kernel<T, Form, kN, 32, 2>);
  run(32, weighted_swiglu_backward_kernel<T, Form, kN, 32, 3>);
}

}  // namespace

void weighted_swiglu_backward(Context& ctx, Tensor dgate_up, Tensor dweights, const Tensor& dy,
                              const Tensor& gate_up, const Tensor& weights, const Tensor& slots,
                              std::optional<double> limit) {
  if (ctx.dry_run || dy.dim(0) == 0) return;
  dispatch_storage("weighted_swiglu_backward", dy, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    with_form(limit, [&](auto form) {
      run_weighted_backward(ctx, WeightedBackward<T, decltype(form)>{
                                     device_data<T>(dgate_up), device_data<float>(dweights),
                                     device_data<T>(dy), device_data<T>(gate_up), device_data<float>(weights),
                                     device_data<int>(slots), dy.dim(0), dy.dim(1), form});
    });
  });
}

}  // namespace sluice::cuda
