// The products of Newton-Schulz, 3 per iteration, are done by cuBLASLt and take most of the time; the kernels
// between them are memory-bound (common/map.cuh). All scalars of the step are read on the device. Not yet run
// on a GPU.
#include "common/map.cuh"
#include "matmul.h"
#include "ops/muon.h"

namespace sluice::cuda {
namespace {

constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;

template <class T>
struct Momentum {
  static constexpr int kWidth = 4, kUnroll = 1;  // more would not fit the registers
  T* update;
  float* m;
  const float* gradient;
  const UpdateControl* control;
  double momentum, initial_momentum, warmup_steps, per_step;  // of momentum, while it warms up
  bool nesterov;
  template <int N>
  struct In {
    Vec<float, N> m, g;
  };
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    return {load_vec<N>(m + i), load_vec<N>(gradient + i)};
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, In<N> in) const {
    const UpdateControl& c = *control;
    Vec<T, N> out;
    if (c.apply == 0) {
#pragma unroll
      for (int e = 0; e < N; ++e) out.v[e] = from_float<T>(0.f);
      store_vec<N>(update + i, out);
      return;
    }
    // As MuonSettings::momentum_at.
    const double now = c.step > warmup_steps ? momentum : initial_momentum + per_step * (c.step - 1);
    const float mu = static_cast<float>(now), fresh = static_cast<float>(1 - now),
                clip = static_cast<float>(c.clip);
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float g = in.g.v[e] * clip;
      in.m.v[e] = mu * in.m.v[e] + fresh * g;
      out.v[e] = from_float<T>(nesterov ? mu * in.m.v[e] + fresh * g : in.m.v[e]);
    }
    store_vec<N>(m + i, in.m);
    store_vec<N>(update + i, out);
  }
};

/// x / (sqrt(squares) + 1e-7).
struct Normalise {
  const double* squares;
  DEVICE_INLINE float operator()(float x) const {
    return x * static_cast<float>(1 / (sqrt(*squares) + 1e-7));
  }
};

/// p = a I + b A + c A^2, (size, size).
template <class T>
struct Polynomial {
  static constexpr int kWidth = 4, kUnroll = 1;  // more would not fit the registers
  T* p;
  const T* a;
  const float* a_squared;
  Divider row;  // by size
  int64_t size;
  template <int N>
  struct In {
    Vec<T, N> a;
    Vec<float, N> a_squared;
  };
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    return {load_vec<N>(a + i), load_vec<N>(a_squared + i)};
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    Vec<T, N> out;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const int64_t r = row.quotient(i + e);
      const float v = kB * to_float(in.a.v[e]) + kC * in.a_squared.v[e];
      out.v[e] = from_float<T>(i + e == r * (size + 1) ? v + kA : v);
    }
    store_vec<N>(p + i, out);
  }
};

template <class T, class U>
struct Apply {
  static constexpr int kWidth = 4, kUnroll = 1;  // more would not fit the registers
  T* value;
  float* master;  // null: value is its own master
  const U* update;
  const UpdateControl* control;
  double rate_per_lr, decay_per_lr;
  template <int N>
  struct In {
    Vec<float, N> w;
    Vec<U, N> update;
  };
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    In<N> in;
    if constexpr (sizeof(T) == 4)
      in.w = load_vec<N>((master ? master : value) + i);
    else
      in.w = load_vec<N>(master + i);
    in.update = load_vec<N>(update + i);
    return in;
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, In<N> in) const {
    const UpdateControl& c = *control;
    if (c.apply == 0) return;
    const float keep = static_cast<float>(1 - c.lr * decay_per_lr),
                rate = static_cast<float>(c.lr * rate_per_lr);
    Vec<T, N> out;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      in.w.v[e] = in.w.v[e] * keep - rate * to_float(in.update.v[e]);
      out.v[e] = from_float<T>(in.w.v[e]);
    }
    if (master) store_vec<N>(master + i, in.w);
    store_vec<N>(value + i, out);
  }
};

}  // namespace

void muon_momentum(Context& ctx, Tensor update, Tensor m, const Tensor& gradient, const Tensor& control,
                   const MuonSettings& settings) {
  if (ctx.dry_run) return;
  const double steps = static_cast<double>(settings.momentum_warmup_steps);
  dispatch_storage("muon_momentum", update, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const Momentum<T> op = {device_data<T>(update),
                            device_data<float>(m),
                            device_data<float>(gradient),
                            device_data<UpdateControl>(control),
                            settings.momentum,
                            settings.initial_momentum,
                            steps,
                            steps > 0 ? (settings.momentum - settings.initial_momentum) / steps : 0,
                            settings.nesterov};
    map(ctx, "muon_momentum", op, m.numel(), aligned(op.update, op.m, op.gradient));
  });
}

void newton_schulz(Context& ctx, Tensor x, const Tensor& squares, int64_t steps) {
  check_storage("newton_schulz", x);
  const int64_t rows = x.dim(0), columns = x.dim(1), s = std::min(rows, columns);
  const bool tall = rows > columns;
  ScratchScope t(ctx.scratch);
  const Tensor spare = t.alloc("newton_schulz x", x.dtype, {rows, columns}),
               a = t.alloc("newton_schulz a", x.dtype, {s, s}),
               a_squared = t.alloc("newton_schulz a^2", DType::f32, {s, s}),
               p = t.alloc("newton_schulz p", x.dtype, {s, s});
  // So that the last iteration writes to x.
  Tensor from = steps % 2 == 0 ? x : spare, to = steps % 2 == 0 ? spare : x;
  dispatch_storage("newton_schulz", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (!ctx.dry_run)
      map_unary(ctx, "newton_schulz normalise", device_data<T>(from),
                static_cast<const T*>(device_data<T>(x)), x.numel(), Normalise{device_data<double>(squares)});
    GpuProduct gram, square, last;
    gram.in = gram.out = square.in = last.in = last.out = x.dtype;
    gram.m = gram.n = s, gram.k = std::max(rows, columns);
    gram.a_transposed = tall, gram.b_transposed = !tall;
    square.m = square.n = square.k = s;
    last.m = rows, last.n = columns, last.k = s;
    for (int64_t step = 0; step < steps; ++step) {
      multiply(ctx, gram, from.data, from.data, a.data);
      multiply(ctx, square, a.data, a.data, a_squared.data);
      const Polynomial<T> op = {device_data<T>(p), device_data<T>(a), device_data<float>(a_squared),
                                Divider(s), s};
      if (!ctx.dry_run) map(ctx, "newton_schulz polynomial", op, s * s, aligned(op.p, op.a, op.a_squared));
      if (tall)
        multiply(ctx, last, from.data, p.data, to.data);
      else
        multiply(ctx, last, p.data, from.data, to.data);
      std::swap(from, to);
    }
  });
}

void muon_apply(Context& ctx, Tensor value, Tensor master, const Tensor& update, const Tensor& control,
                double lr_multiplier, double weight_decay) {
  if (ctx.dry_run) return;
  const double shape =
      std::sqrt(std::max(1.0, static_cast<double>(value.dim(0)) / static_cast<double>(value.dim(1))));
  dispatch_storage("muon_apply", value, [&](auto* value_tag) {
    dispatch_storage("muon_apply", update, [&](auto* update_tag) {
      using T = std::remove_pointer_t<decltype(value_tag)>;
      using U = std::remove_pointer_t<decltype(update_tag)>;
      const Apply<T, U> op = {device_data<T>(value),  device_data<float>(master),
                              device_data<U>(update), device_data<UpdateControl>(control),
                              lr_multiplier * shape,  lr_multiplier * weight_decay};
      map(ctx, "muon_apply", op, value.numel(), aligned(op.value, op.master, op.update));
    });
  });
}

}  // namespace sluice::cuda
