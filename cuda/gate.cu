// Bound by memory. What runs in training, scores specific to a head and of every token (Z = T), has kernels of its own:
// elementwise a map (common/map.cuh); headwise backward a group of lanes per row (common/rows.cuh), so that x and dy are
// read once. Scores shared by heads: elementwise a thread takes one token's channels over all heads, headwise a block takes
// a token. Z = 1: scores and slopes are tables, computed first; the gradient sums over tokens in fixed order (partial sums
// per block, then column_sums) and is folded over channels and heads last. Not yet run on a GPU.
#include "ops/gate.h"

#include "common/math.cuh"
#include "common/rows.cuh"

namespace sluice::cuda {
namespace {

constexpr int kBlock = 256;

DEVICE_INLINE float combine(GateCombine c, float x, float s) { return c == GateCombine::multiply ? x * s : x + s; }

struct GateShape {
  int64_t tokens, channels;
  int heads;
  bool headwise, per_token;  // per_token: Z = T

  GateShape(const Tensor& x, const Tensor& z)
      : tokens(x.dim(0)),
        channels(x.dim(2)),
        heads(static_cast<int>(x.dim(1))),
        headwise(z.rank == 2),
        per_token(z.dim(0) == x.dim(0)) {}
  int64_t row() const { return heads * channels; }
  int64_t slots() const { return headwise ? heads : row(); }  // scores of one token
};

// ---- forward

/// y = x combined with the score of its place: one of each element, of each row of channels, or of each place in a token.
template <class T, class Z, bool kActivate>
struct Apply {
  static constexpr int kWidth = kVecWidth<T>, kUnroll = 2;
  T* y;
  const T* x;
  const Z* z;  // scores, or logits with kActivate
  GateKind kind;
  Divider channels;  // of headwise scores
  int64_t period;    // of elements after which scores repeat; 0: never
  bool headwise;
  Divider token = Divider(period);
  template <int N>
  struct In {
    Vec<T, N> x;
    Vec<Z, N> z;
  };
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    In<N> in;
    in.x = load_vec<N>(x + i);
    const int64_t at = period > 0 ? i - token.quotient(i) * period : i;
    if (headwise) in.z.v[0] = z[channels.quotient(at)];  // N divides the channels
    else in.z = load_vec<N>(z + at);
    return in;
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    Vec<T, N> out;
    float s = 0;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      if (e == 0 || !headwise) {
        s = to_float(in.z.v[e]);
        if constexpr (kActivate) s = activate(kind.activation, s, sigmoid(s));
      }
      out.v[e] = from_float<T>(combine(kind.combine, to_float(in.x.v[e]), s));
    }
    store_vec<N>(y + i, out);
  }
};

template <bool kActivate, class T, class Z>
void apply_scores(Context& ctx, const GateShape& g, T* y, const T* x, const Z* z, const GateKind& kind) {
  const int64_t n = g.tokens * g.row();
  const Apply<T, Z, kActivate> op = {y, x, z, kind, Divider(g.channels), g.per_token ? 0 : g.row(), g.headwise};
  map(ctx, "gate_forward", op, n, aligned(y, x, z) && g.channels % op.kWidth == 0);
}

/// Slot w of a token (a channel, or 0 of headwise scores) and its logits of every head, `stride` apart.
template <class Z>
struct SharedScore {
  const Z* z;
  int heads;
  int64_t stride;
  GateKind kind;

  /// Averaged over heads, after the activation or before it.
  DEVICE_INLINE float score() const {
    float sum = 0;
    const bool after = kind.sharing == GateSharing::shared;
    for (int h = 0; h < heads; ++h) {
      const float v = to_float(z[h * stride]);
      sum += after ? activate(kind.activation, v, sigmoid(v)) : v;
    }
    sum /= static_cast<float>(heads);
    return after ? sum : activate(kind.activation, sum, sigmoid(sum));
  }
  /// Of the score in head h's logit.
  DEVICE_INLINE float slope(int h) const {
    float v = to_float(z[h * stride]);
    if (kind.sharing == GateSharing::shared_before_activation) {
      v = 0;
      for (int i = 0; i < heads; ++i) v += to_float(z[i * stride]);
      v /= static_cast<float>(heads);
    }
    return slope_of(kind.activation, v, sigmoid(v)) / static_cast<float>(heads);
  }
};

/// scores (Z, slots) f32 and, unless null, slopes; a thread per score.
template <class Z>
__global__ void __launch_bounds__(kBlock)
    scores_kernel(float* scores, float* slopes, const Z* z, int64_t count, int heads, int64_t width, GateKind kind) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x, slots = heads * width;
  if (i >= count) return;
  if (kind.sharing == GateSharing::specific) {
    const float v = to_float(z[i]), s = sigmoid(v);
    scores[i] = activate(kind.activation, v, s);
    if (slopes) slopes[i] = slope_of(kind.activation, v, s);
    return;
  }
  const int64_t token = i / slots, slot = i - token * slots, head = slot / width;
  const SharedScore<Z> shared = {z + token * slots + (slot - head * width), heads, width, kind};
  scores[i] = shared.score();
  if (slopes) slopes[i] = shared.slope(static_cast<int>(head));
}

template <class Z>
void compute_scores(Context& ctx, float* scores, float* slopes, const Z* z, int64_t rows, int heads, int64_t width,
                    const GateKind& kind) {
  const int64_t count = rows * heads * width;
  if (count == 0) return;
  launch(ctx, "gate_scores", {.grid = dim3(blocks_for(count, kBlock)), .block = dim3(kBlock)}, scores_kernel<Z>, scores,
         slopes, z, count, heads, width, kind);
}

// ---- backward, Z = T

template <class T>
struct Backward {
  T *dx, *dz;
  const T *dy, *x, *z;
  int64_t tokens, channels;
  int heads;
  GateKind kind;
};

/// Elementwise and specific: everything of an element is its own.
template <class T>
struct BackwardElements {
  static constexpr int kWidth = kVecWidth<T>, kUnroll = 2;
  T *dx, *dz;
  const T *dy, *x, *z;
  GateKind kind;
  template <int N>
  struct In {
    Vec<T, N> dy, x, z;
  };
  template <int N>
  DEVICE_INLINE In<N> load(int64_t i) const {
    return {load_vec<N>(dy + i), load_vec<N>(x + i), load_vec<N>(z + i)};
  }
  template <int N>
  DEVICE_INLINE void apply(int64_t i, const In<N>& in) const {
    const bool multiply = kind.combine == GateCombine::multiply;
    Vec<T, N> out, dout;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const float d = to_float(in.dy.v[e]), v = to_float(in.z.v[e]), s = sigmoid(v);
      out.v[e] = from_float<T>(multiply ? d * activate(kind.activation, v, s) : d);
      dout.v[e] = from_float<T>((multiply ? d * to_float(in.x.v[e]) : d) * slope_of(kind.activation, v, s));
    }
    store_vec<N>(dx + i, out);
    store_vec<N>(dz + i, dout);
  }
};

/// Headwise and specific: kLanes threads take a row of channels, kN at a time.
template <class T, int kLanes, int kN>
__global__ void __launch_bounds__(kBlock) backward_heads_kernel(Backward<T> b) {
  constexpr int kStep = kLanes * kN;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kBlock / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
  const bool mine = row < b.tokens * b.heads, multiply = b.kind.combine == GateCombine::multiply;
  const float v = mine ? to_float(b.z[row]) : 0.f, sig = sigmoid(v), s = activate(b.kind.activation, v, sig);
  const int64_t at = row * b.channels;
  float ds = 0;
#pragma unroll 2
  for (int64_t i = lane * kN; mine && i < b.channels; i += kStep) {
    Vec<T, kN> d = load_vec<kN>(b.dy + at + i), x;
    if (multiply) x = load_vec<kN>(b.x + at + i);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const float de = to_float(d.v[e]);
      ds += multiply ? de * to_float(x.v[e]) : de;
      if (multiply) d.v[e] = from_float<T>(de * s);
    }
    store_vec<kN>(b.dx + at + i, d);
  }
  ds = GroupSum<kBlock, kLanes>()(ds);
  if (mine && lane == 0) b.dz[row] = from_float<T>(ds * slope_of(b.kind.activation, v, sig));
}

/// Elementwise and shared: a thread takes one channel of a token over all heads, three times (twice from cache).
template <class T>
__global__ void __launch_bounds__(kBlock) backward_shared_elements_kernel(Backward<T> b, Divider by_channels) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (i >= b.tokens * b.channels) return;
  const int64_t token = by_channels.quotient(i), at = token * b.heads * b.channels + (i - token * b.channels);
  const bool multiply = b.kind.combine == GateCombine::multiply;
  const SharedScore<T> shared = {b.z + at, b.heads, b.channels, b.kind};
  const float s = multiply ? shared.score() : 0.f;
  float ds = 0;
  for (int h = 0; h < b.heads; ++h) {
    const int64_t k = at + h * b.channels;
    const float d = to_float(b.dy[k]);
    ds += multiply ? d * to_float(b.x[k]) : d;
    b.dx[k] = from_float<T>(multiply ? d * s : d);
  }
  float slope = 0;
  for (int h = 0; h < b.heads; ++h) {
    if (h == 0 || b.kind.sharing == GateSharing::shared) slope = shared.slope(h);  // before: the same for all
    b.dz[at + h * b.channels] = from_float<T>(slope * ds);
  }
}

/// Headwise and shared: a block takes a token.
template <class T>
__global__ void __launch_bounds__(kBlock) backward_shared_heads_kernel(Backward<T> b) {
  const int64_t token = blockIdx.x, row = b.heads * b.channels, at = token * row;
  const bool multiply = b.kind.combine == GateCombine::multiply;
  const SharedScore<T> shared = {b.z + token * b.heads, b.heads, 1, b.kind};
  const float s = multiply ? shared.score() : 0.f;
  float ds = 0;
  for (int64_t i = threadIdx.x; i < row; i += kBlock) {
    const float d = to_float(b.dy[at + i]);
    ds += multiply ? d * to_float(b.x[at + i]) : d;
    b.dx[at + i] = from_float<T>(multiply ? d * s : d);
  }
  ds = block_sum<kBlock>(ds);
  for (int h = static_cast<int>(threadIdx.x); h < b.heads; h += kBlock)
    b.dz[token * b.heads + h] = from_float<T>(shared.slope(h) * ds);
}

// ---- backward, Z = 1

/// Block (columns, chunk): a thread takes one column of x (T, H D) over the tokens of the chunk, writes dx, and keeps the
/// sum of ds, which it stores in partials (chunks, H D).
template <class T>
__global__ void __launch_bounds__(kBlock)
    backward_constant_kernel(T* dx, float* partials, const T* dy, const T* x, const float* scores, int64_t tokens,
                             int64_t row, int64_t channels, bool headwise, bool multiply) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (column >= row) return;
  const float s = scores[headwise ? column / channels : column];
  float sum = 0;
#pragma unroll 4
  for (int64_t t = blockIdx.y; t < tokens; t += gridDim.y) {
    const float d = to_float(dy[t * row + column]);
    sum += multiply ? d * to_float(x[t * row + column]) : d;
    dx[t * row + column] = from_float<T>(multiply ? d * s : d);
  }
  partials[blockIdx.y * row + column] = sum;
}

/// dz += slope * sums, folded over channels (headwise) and heads (shared). A block per score; sums (H, D).
__global__ void __launch_bounds__(32)
    fold_constant_kernel(float* dz, const float* sums, const float* slopes, int heads, int64_t channels, bool headwise,
                         bool shared) {
  const int64_t slot = blockIdx.x, width = headwise ? 1 : channels, head = slot / width, channel = slot - head * width;
  const int first = shared ? 0 : static_cast<int>(head), last = shared ? heads : first + 1;
  float sum = 0;
  for (int h = first; h < last; ++h) {
    if (headwise) {
      for (int64_t c = threadIdx.x; c < channels; c += 32) sum += sums[h * channels + c];
    } else if (threadIdx.x == 0) {
      sum += sums[h * channels + channel];
    }
  }
  sum = warp_sum(sum);
  if (threadIdx.x == 0) dz[slot] += slopes[slot] * sum;
}

template <class T>
void backward_per_token(Context& ctx, const Backward<T>& b, bool headwise) {
  const char* const name = "gate_backward";
  const int64_t row = b.heads * b.channels, rows = b.tokens * b.heads;
  constexpr int kN = kVecWidth<T>;
  if (b.kind.sharing != GateSharing::specific) {
    if (headwise)
      launch(ctx, name, {.grid = dim3(static_cast<unsigned>(b.tokens)), .block = dim3(kBlock)},
             backward_shared_heads_kernel<T>, b);
    else
      launch(ctx, name, {.grid = dim3(blocks_for(b.tokens * b.channels, kBlock)), .block = dim3(kBlock)},
             backward_shared_elements_kernel<T>, b, Divider(b.channels));
  } else if (!headwise) {
    const BackwardElements<T> op = {b.dx, b.dz, b.dy, b.x, b.z, b.kind};
    map(ctx, name, op, b.tokens * row, aligned(b.dx, b.dz, b.dy, b.x, b.z));
  } else if (b.channels % kN != 0 || !aligned(b.dx, b.dy, b.x)) {
    launch(ctx, name, {.grid = dim3(blocks_for(rows, kBlock / 32)), .block = dim3(kBlock)},
           backward_heads_kernel<T, 32, 1>, b);
  } else if (b.channels / kN <= 8) {
    launch(ctx, name, {.grid = dim3(blocks_for(rows, kBlock / 8)), .block = dim3(kBlock)},
           backward_heads_kernel<T, 8, kN>, b);
  } else if (b.channels / kN <= 256) {
    launch(ctx, name, {.grid = dim3(blocks_for(rows, kBlock / 16)), .block = dim3(kBlock)},
           backward_heads_kernel<T, 16, kN>, b);
  } else {  // one gate over the whole hidden state
    launch(ctx, name, {.grid = dim3(static_cast<unsigned>(rows)), .block = dim3(kBlock)},
           backward_heads_kernel<T, kBlock, kN>, b);
  }
}

}  // namespace

void gate_forward(Context& ctx, Tensor y, const Tensor& x, const Tensor& z, const GateKind& kind) {
  const GateShape g(x, z);
  const bool table = !g.per_token || kind.sharing != GateSharing::specific;
  ScratchScope scratch(ctx.scratch);
  Tensor scores;
  if (table) scores = scratch.alloc("gate_scores", DType::f32, {z.dim(0), g.slots()});
  if (ctx.dry_run) return;
  dispatch_storage("gate_forward", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    T* const yp = device_data<T>(y);
    const T *const xp = device_data<T>(x), *const zp = device_data<T>(z);
    if (!table) return apply_scores<true, T, T>(ctx, g, yp, xp, zp, kind);
    float* const s = device_data<float>(scores);
    compute_scores(ctx, s, nullptr, zp, z.dim(0), g.heads, g.headwise ? 1 : g.channels, kind);
    apply_scores<false, T, float>(ctx, g, yp, xp, s, kind);
  });
}

void gate_backward(Context& ctx, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x, const Tensor& z,
                   const GateKind& kind) {
  const GateShape g(x, z);
  const int64_t row = g.row(), slots = g.slots();
  if (g.per_token) {
    if (ctx.dry_run || g.tokens * row == 0) return;
    dispatch_storage("gate_backward", x, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      backward_per_token<T>(ctx,
                            {device_data<T>(dx), device_data<T>(dz), device_data<T>(dy), device_data<T>(x),
                             device_data<T>(z), g.tokens, g.channels, g.heads, kind},
                            g.headwise);
    });
    return;
  }
  // About 1000 blocks of 256 columns, at least 8 tokens each; by shapes alone, so that sums repeat on every GPU.
  const int64_t columns = blocks_for(row, kBlock), most = std::max<int64_t>(1024 / std::max<int64_t>(columns, 1), 1);
  const int64_t chunks = std::max<int64_t>(std::min((g.tokens + 7) / 8, most), 1);
  ScratchScope scratch(ctx.scratch);
  const Tensor scores = scratch.alloc("gate_scores", DType::f32, {slots});
  const Tensor slopes = scratch.alloc("gate_slopes", DType::f32, {slots});
  const Tensor partials = scratch.alloc("gate_dz", DType::f32, {chunks, row});
  const Tensor sums = scratch.alloc("gate_dz_sums", DType::f32, {row});
  if (ctx.dry_run || g.tokens * row == 0) return;
  dispatch_storage("gate_backward", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    float *const s = device_data<float>(scores), *const slope = device_data<float>(slopes);
    compute_scores(ctx, s, slope, device_data<T>(z), 1, g.heads, g.headwise ? 1 : g.channels, kind);
    launch(ctx, "gate_backward",
           {.grid = dim3(static_cast<unsigned>(columns), static_cast<unsigned>(chunks)), .block = dim3(kBlock)},
           backward_constant_kernel<T>, device_data<T>(dx), device_data<float>(partials), device_data<T>(dy),
           device_data<T>(x), s, g.tokens, row, g.channels, g.headwise, kind.combine == GateCombine::multiply);
    column_sums(ctx, "gate_backward dz", device_data<float>(sums), device_data<float>(partials), chunks, row,
                Into::overwrite);
    launch(ctx, "gate_backward dz", {.grid = dim3(static_cast<unsigned>(slots)), .block = dim3(32)},
           fold_constant_kernel, device_data<float>(dz), device_data<float>(sums), slope, g.heads, g.channels,
           g.headwise, kind.sharing != GateSharing::specific);
  });
}

void gate_scores(Context& ctx, Tensor scores, const Tensor& z, const GateKind& kind) {
  if (ctx.dry_run) return;
  dispatch_storage("gate_scores", z, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    compute_scores(ctx, device_data<float>(scores), nullptr, device_data<T>(z), z.dim(0), static_cast<int>(z.dim(1)),
                   z.rank == 3 ? z.dim(2) : 1, kind);
  });
}

}  // namespace sluice::cuda
