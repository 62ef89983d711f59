// Memory-bound. The common case in training, scores per token (Z = T) and specific to a head, has separate
// kernels: elementwise a map (common/map.cuh); headwise backward a group of lanes per row (common/rows.cuh),
// so that x and dy are read once. Scores shared by heads: elementwise, a thread processes some channels of a
// token over all heads; headwise, a block processes a token. Z = 1: tables of scores and slopes are computed
// first; the gradient is summed over tokens in a deterministic order (partial sums per block, then
// column_sums) and finally over channels and heads. Not yet run on a GPU.
#include "common/math.cuh"
#include "common/rows.cuh"
#include "ops/gate.h"

namespace sluice::cuda {
namespace {

constexpr int kBlock = 256;

DEVICE_INLINE float combine(GateCombine c, float x, float s) {
  return c == GateCombine::multiply ? x * s : x + s;
}

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

/// Calls body(elements per vector): 16 bytes if channels and all addresses are multiples of that, otherwise
/// one element.
template <class T, class Body>
void with_channel_vectors(int64_t channels, bool aligned_addresses, Body&& body) {
  if (aligned_addresses && channels % kVecWidth<T> == 0)
    body(std::integral_constant<int, kVecWidth<T>>());
  else
    body(std::integral_constant<int, 1>());
}

// ---- forward

/// y = x combined with its score: one score per element, per row of channels, or per position in a token.
template <class T, class Z, bool kActivate>
struct Apply {
  static constexpr int kWidth = kVecWidth<T>, kUnroll = 2;
  T* y;
  const T* x;
  const Z* z;  // scores, or logits with kActivate
  GateKind kind;
  Divider channels;  // of headwise scores
  int64_t period;    // number of elements after which scores repeat; 0: never
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
    if (headwise)
      in.z.v[0] = z[channels.quotient(at)];  // N divides the channels
    else
      in.z = load_vec<N>(z + at);
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
  const Apply<T, Z, kActivate> op = {y,         x, z, kind, Divider(g.channels), g.per_token ? 0 : g.row(),
                                     g.headwise};
  map(ctx, "gate_forward", op, n, aligned(y, x, z) && g.channels % op.kWidth == 0);
}

/// kN adjacent slots of a token (channels, or the single slot of headwise scores), and their logits in all
/// heads, `stride` apart.
template <int kN, class Z>
struct SharedScores {
  const Z* z;
  int heads;
  int64_t stride;
  GateKind kind;
  float share;  // 1 / heads

  /// The mean over heads of the scores, or of the logits.
  DEVICE_INLINE void mean(bool of_scores, float (&s)[kN]) const {
#pragma unroll
    for (int e = 0; e < kN; ++e) s[e] = 0;
#pragma unroll 4
    for (int h = 0; h < heads; ++h) {
      const Vec<Z, kN> v = load_vec<kN>(z + h * stride);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const float f = to_float(v.v[e]);
        s[e] += of_scores ? activate(kind.activation, f, sigmoid(f)) : f;
      }
    }
#pragma unroll
    for (int e = 0; e < kN; ++e) s[e] *= share;
  }
  DEVICE_INLINE void scores(float (&s)[kN]) const {
    mean(kind.sharing == GateSharing::shared, s);
    if (kind.sharing == GateSharing::shared) return;
#pragma unroll
    for (int e = 0; e < kN; ++e) s[e] = activate(kind.activation, s[e], sigmoid(s[e]));
  }
  /// Slopes of the scores with respect to head h's logits.
  DEVICE_INLINE void slopes(int h, float (&s)[kN]) const {
    if (kind.sharing == GateSharing::shared) {
      const Vec<Z, kN> v = load_vec<kN>(z + h * stride);
#pragma unroll
      for (int e = 0; e < kN; ++e) s[e] = to_float(v.v[e]);
    } else {
      mean(false, s);
    }
#pragma unroll
    for (int e = 0; e < kN; ++e) s[e] = slope_of(kind.activation, s[e], sigmoid(s[e])) * share;
  }
};

/// Elementwise and shared, per token: a thread processes kN channels of a token over all heads.
template <class T, int kN>
__global__ void __launch_bounds__(kBlock)
    forward_shared_elements_kernel(T* y, const T* x, const T* z, int64_t units, int heads, int64_t channels,
                                   GateKind kind, float share, Divider per_token) {
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (unit >= units) return;
  const int64_t token = per_token.quotient(unit), at = token * (heads - 1) * channels + unit * kN;
  float s[kN];
  SharedScores<kN, T>{z + at, heads, channels, kind, share}.scores(s);
#pragma unroll 4
  for (int h = 0; h < heads; ++h) {
    Vec<T, kN> v = load_vec<kN>(x + at + h * channels);
#pragma unroll
    for (int e = 0; e < kN; ++e) v.v[e] = from_float<T>(combine(kind.combine, to_float(v.v[e]), s[e]));
    store_vec<kN>(y + at + h * channels, v);
  }
}

/// scores (Z, slots) f32 and, unless null, slopes; a thread per score.
template <class Z>
__global__ void __launch_bounds__(kBlock)
    scores_kernel(float* scores, float* slopes, const Z* z, int64_t count, int heads, int64_t width,
                  GateKind kind, float share) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x, slots = heads * width;
  if (i >= count) return;
  if (kind.sharing == GateSharing::specific) {
    const float v = to_float(z[i]), s = sigmoid(v);
    scores[i] = activate(kind.activation, v, s);
    if (slopes) slopes[i] = slope_of(kind.activation, v, s);
    return;
  }
  const int64_t token = i / slots, slot = i - token * slots, head = slot / width;
  const SharedScores<1, Z> shared = {z + token * slots + (slot - head * width), heads, width, kind, share};
  float s[1];
  shared.scores(s);
  scores[i] = s[0];
  if (!slopes) return;
  shared.slopes(static_cast<int>(head), s);
  slopes[i] = s[0];
}

template <class Z>
void compute_scores(Context& ctx, float* scores, float* slopes, const Z* z, int64_t rows, int heads,
                    int64_t width, const GateKind& kind) {
  const int64_t count = rows * heads * width;
  if (count == 0) return;
  launch(ctx, "gate_scores", {.grid = dim3(blocks_for(count, kBlock)), .block = dim3(kBlock)},
         scores_kernel<Z>, scores, slopes, z, count, heads, width, kind, 1.f / static_cast<float>(heads));
}

// ---- backward, Z = T

template <class T>
struct Backward {
  T *dx, *dz;
  const T *dy, *x, *z;
  int64_t tokens, channels;
  int heads;
  GateKind kind;
  float share;          // 1 / heads
  const double* dhead;  // (H): an additional gradient of a head's mean score; may be null
  int64_t dz_gap;       // elements from the end of one token's dz to the next's
};

/// Elementwise and specific: elements are independent. kApart: between one token's dz and the next's lies
/// something else.
template <class T, bool kApart>
struct BackwardElements {
  static constexpr int kWidth = kVecWidth<T>, kUnroll = kApart ? 1 : 2;
  T *dx, *dz;
  const T *dy, *x, *z;
  GateKind kind;
  const double* dhead;  // may be null
  float part;           // 1 / channels
  Divider channels, heads;
  int num_heads;
  int64_t dz_gap;
  Divider token;  // by the elements of a token
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
      float ds = multiply ? d * to_float(in.x.v[e]) : d;
      if (dhead) {
        const int64_t row = channels.quotient(i + e);
        ds += part * static_cast<float>(dhead[row - heads.quotient(row) * num_heads]);
      }
      dout.v[e] = from_float<T>(ds * slope_of(kind.activation, v, s));
    }
    store_vec<N>(dx + i, out);
    if constexpr (kApart)
      store_vec<N>(dz + i + token.quotient(i) * dz_gap, dout);
    else
      store_vec<N>(dz + i, dout);
  }
};

/// Headwise and specific: kLanes threads process a row of channels, kN at a time.
template <class T, int kLanes, int kN>
__global__ void __launch_bounds__(kBlock) backward_heads_kernel(Backward<T> b) {
  constexpr int kStep = kLanes * kN;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kBlock / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
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
  if (mine && b.dhead) ds += static_cast<float>(b.dhead[row % b.heads]);
  if (mine && lane == 0)
    b.dz[row + row / b.heads * b.dz_gap] = from_float<T>(ds * slope_of(b.kind.activation, v, sig));
}

/// Elementwise and shared: a thread takes kN channels of a token over all heads, three times (z twice, from
/// cache). kApart as above.
template <class T, int kN, bool kApart>
__global__ void __launch_bounds__(kBlock)
    backward_shared_elements_kernel(Backward<T> b, int64_t units, Divider per_token) {
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (unit >= units) return;
  const int64_t token = per_token.quotient(unit), at = token * (b.heads - 1) * b.channels + unit * kN;
  const bool multiply = b.kind.combine == GateCombine::multiply;
  const SharedScores<kN, T> shared = {b.z + at, b.heads, b.channels, b.kind, b.share};
  float s[kN], ds[kN] = {};
  if (multiply) shared.scores(s);
  [[maybe_unused]] constexpr int kUnroll = kApart ? 1 : 2;
#pragma unroll kUnroll
  for (int h = 0; h < b.heads; ++h) {
    const int64_t k = at + h * b.channels;
    Vec<T, kN> d = load_vec<kN>(b.dy + k), x;
    if (multiply) x = load_vec<kN>(b.x + k);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const float de = to_float(d.v[e]);
      ds[e] += multiply ? de * to_float(x.v[e]) : de;
      if (multiply) d.v[e] = from_float<T>(de * s[e]);
    }
    store_vec<kN>(b.dx + k, d);
  }
  const int64_t dz_at = kApart ? at + token * b.dz_gap : at;
  for (int h = 0; h < b.heads; ++h) {
    if (h == 0 || b.kind.sharing == GateSharing::shared) shared.slopes(h, s);  // before: the same for all
    Vec<T, kN> dz;
#pragma unroll
    for (int e = 0; e < kN; ++e) dz.v[e] = from_float<T>(s[e] * ds[e]);
    store_vec<kN>(b.dz + dz_at + h * b.channels, dz);
  }
}

/// Headwise and shared: a block processes a token.
template <class T>
__global__ void __launch_bounds__(kBlock) backward_shared_heads_kernel(Backward<T> b) {
  const int64_t token = blockIdx.x, row = b.heads * b.channels, at = token * row;
  const bool multiply = b.kind.combine == GateCombine::multiply;
  const SharedScores<1, T> shared = {b.z + token * b.heads, b.heads, 1, b.kind, b.share};
  float s[1] = {};
  if (multiply) shared.scores(s);
  float ds = 0;
  for (int64_t i = threadIdx.x; i < row; i += kBlock) {
    const float d = to_float(b.dy[at + i]);
    ds += multiply ? d * to_float(b.x[at + i]) : d;
    b.dx[at + i] = from_float<T>(multiply ? d * s[0] : d);
  }
  ds = block_sum<kBlock>(ds);
  for (int h = static_cast<int>(threadIdx.x); h < b.heads; h += kBlock) {
    shared.slopes(h, s);
    b.dz[token * (b.heads + b.dz_gap) + h] = from_float<T>(s[0] * ds);
  }
}

// ---- backward, Z = 1

template <class T>
struct BackwardConstant {
  T* dx;
  float* partials;  // (chunks, H D)
  const T *dy, *x;
  const float* scores;
  int64_t tokens, row, channels;  // row = H D
  bool headwise, multiply;
};

/// Block (columns, chunk): a thread takes kN columns of x (T, H D) over every chunks-th token, kTokens at
/// once, writes dx, and keeps the sums of ds.
template <class T, int kN>
__global__ void __launch_bounds__(kBlock) backward_constant_kernel(BackwardConstant<T> b) {
  constexpr int kTokens = 2;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * kN, chunks = gridDim.y;
  if (column >= b.row) return;
  float s[kN], sum[kN] = {};
#pragma unroll
  for (int e = 0; e < kN; ++e) s[e] = b.scores[b.headwise ? column / b.channels : column + e];
  for (int64_t first = blockIdx.y; first < b.tokens; first += kTokens * chunks) {
    Vec<T, kN> d[kTokens], x[kTokens];
#pragma unroll
    for (int k = 0; k < kTokens; ++k) {
      const int64_t t = first + k * chunks;
      if (t < b.tokens) {
        d[k] = load_vec<kN>(b.dy + t * b.row + column);
        if (b.multiply) x[k] = load_vec<kN>(b.x + t * b.row + column);
      }
    }
#pragma unroll
    for (int k = 0; k < kTokens; ++k) {
      const int64_t t = first + k * chunks;
      if (t < b.tokens) {
#pragma unroll
        for (int e = 0; e < kN; ++e) {
          const float de = to_float(d[k].v[e]);
          sum[e] += b.multiply ? de * to_float(x[k].v[e]) : de;
          if (b.multiply) d[k].v[e] = from_float<T>(de * s[e]);
        }
        store_vec<kN>(b.dx + t * b.row + column, d[k]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kN; ++e) b.partials[blockIdx.y * b.row + column + e] = sum[e];
}

/// dz += slope * sums, folded over channels (headwise) and heads (shared). A block per score; sums (H, D).
__global__ void __launch_bounds__(32)
    fold_constant_kernel(float* dz, const float* sums, const float* slopes, int heads, int64_t channels,
                         bool headwise, bool shared, const double* dhead, float tokens) {
  const int64_t slot = blockIdx.x, width = headwise ? 1 : channels, head = slot / width,
                channel = slot - head * width;
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
  if (dhead) sum += tokens * static_cast<float>(dhead[head]) / static_cast<float>(width);
  if (threadIdx.x == 0) dz[slot] += slopes[slot] * sum;
}

template <class T>
void backward_per_token(Context& ctx, const Backward<T>& b, bool headwise) {
  const char* const name = "gate_backward";
  const int64_t row = b.heads * b.channels, rows = b.tokens * b.heads;
  constexpr int kN = kVecWidth<T>;
  const bool dz_aligned = aligned(b.dz) && (b.dz_gap == 0 || (row % kN == 0 && b.dz_gap % kN == 0));
  const auto with_gap = [&](auto&& body) { b.dz_gap > 0 ? body(std::true_type()) : body(std::false_type()); };
  if (b.kind.sharing != GateSharing::specific) {
    if (headwise)
      launch(ctx, name, {.grid = dim3(static_cast<unsigned>(b.tokens)), .block = dim3(kBlock)},
             backward_shared_heads_kernel<T>, b);
    else
      with_channel_vectors<T>(b.channels, dz_aligned && aligned(b.dx, b.dy, b.x, b.z), [&](auto width) {
        const int64_t units = b.tokens * b.channels / width();
        with_gap([&](auto apart) {
          launch(ctx, name, {.grid = dim3(blocks_for(units, kBlock)), .block = dim3(kBlock)},
                 backward_shared_elements_kernel<T, width(), apart()>, b, units,
                 Divider(b.channels / width()));
        });
      });
  } else if (!headwise) {
    with_gap([&](auto apart) {
      const BackwardElements<T, apart()> op = {b.dx,
                                               b.dz,
                                               b.dy,
                                               b.x,
                                               b.z,
                                               b.kind,
                                               b.dhead,
                                               1.f / static_cast<float>(b.channels),
                                               Divider(b.channels),
                                               Divider(b.heads),
                                               b.heads,
                                               b.dz_gap,
                                               Divider(row)};
      map(ctx, name, op, b.tokens * row, dz_aligned && aligned(b.dx, b.dy, b.x, b.z));
    });
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
  const bool shared = kind.sharing != GateSharing::specific, table = !g.per_token || (shared && g.headwise);
  ScratchScope scratch(ctx.scratch);
  Tensor scores;
  if (table) scores = scratch.alloc("gate_scores", DType::f32, {z.dim(0), g.slots()});
  if (ctx.dry_run || g.tokens * g.row() == 0) return;
  dispatch_storage("gate_forward", x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    T* const yp = device_data<T>(y);
    const T *const xp = device_data<T>(x), *const zp = device_data<T>(z);
    if (table) {
      float* const s = device_data<float>(scores);
      compute_scores(ctx, s, nullptr, zp, z.dim(0), g.heads, g.headwise ? 1 : g.channels, kind);
      apply_scores<false, T, float>(ctx, g, yp, xp, s, kind);
    } else if (shared) {
      with_channel_vectors<T>(g.channels, aligned(yp, xp, zp), [&](auto width) {
        const int64_t units = g.tokens * g.channels / width();
        launch(ctx, "gate_forward", {.grid = dim3(blocks_for(units, kBlock)), .block = dim3(kBlock)},
               forward_shared_elements_kernel<T, width()>, yp, xp, zp, units, g.heads, g.channels, kind,
               1.f / static_cast<float>(g.heads), Divider(g.channels / width()));
      });
    } else {
      apply_scores<true, T, T>(ctx, g, yp, xp, zp, kind);
    }
  });
}

void gate_backward(Context& ctx, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x, const Tensor& z,
                   const GateKind& kind, const Tensor& dhead) {
  const GateShape g(x, z);
  const int64_t row = g.row(), slots = g.slots();
  if (g.per_token) {
    if (ctx.dry_run || g.tokens * row == 0) return;
    dispatch_storage("gate_backward", x, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      backward_per_token<T>(
          ctx,
          {device_data<T>(dx), device_data<T>(dz), device_data<T>(dy), device_data<T>(x), device_data<T>(z),
           g.tokens, g.channels, g.heads, kind, 1.f / static_cast<float>(g.heads),
           dhead ? device_data<double>(dhead) : nullptr, dz.stride() - slots},
          g.headwise);
    });
    return;
  }
  // About four blocks per SM of a GPU with 132 SMs, at least 8 tokens each; depends only on shapes, so that
  // sums are equal on every GPU.
  const int64_t wide = g.channels * dtype_size(x.dtype) % 16 == 0 ? 16 / dtype_size(x.dtype) : 1;
  const int64_t most = std::max<int64_t>(528 / std::max<int64_t>(blocks_for(row, kBlock * wide), 1), 1);
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
    const BackwardConstant<T> b = {device_data<T>(dx),
                                   device_data<float>(partials),
                                   device_data<T>(dy),
                                   device_data<T>(x),
                                   s,
                                   g.tokens,
                                   row,
                                   g.channels,
                                   g.headwise,
                                   kind.combine == GateCombine::multiply};
    with_channel_vectors<T>(g.channels, aligned(b.dx, b.dy, b.x), [&](auto width) {
      const dim3 grid(blocks_for(row, kBlock * width()), static_cast<unsigned>(chunks));
      launch(ctx, "gate_backward", {.grid = grid, .block = dim3(kBlock)},
             backward_constant_kernel<T, width()>, b);
    });
    column_sums(ctx, "gate_backward dz", device_data<float>(sums), device_data<float>(partials), chunks, row,
                Into::overwrite);
    launch(ctx, "gate_backward dz", {.grid = dim3(static_cast<unsigned>(slots)), .block = dim3(32)},
           fold_constant_kernel, device_data<float>(dz), device_data<float>(sums), slope, g.heads, g.channels,
           g.headwise, kind.sharing != GateSharing::specific,
           dhead ? static_cast<const double*>(device_data<double>(dhead)) : nullptr,
           static_cast<float>(g.tokens));
  });
}

void gate_scores(Context& ctx, Tensor scores, const Tensor& z, const GateKind& kind) {
  if (ctx.dry_run) return;
  dispatch_storage("gate_scores", z, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    compute_scores(ctx, device_data<float>(scores), nullptr, device_data<T>(z), z.dim(0),
                   static_cast<int>(z.dim(1)), z.rank == 3 ? z.dim(2) : 1, kind);
  });
}

}  // namespace sluice::cuda
