// Attention on CUDA: selection of the kernel, and the output's sink and gate if a kernel does not fuse them.
//   f32 storage; softpick; bf16 with a head_dim other than 64, 128, 256    f32.cu
//   bf16 on sm_90                                                hopper_*.cu, with the output fused
//   bf16 elsewhere                                               mma*.cu, with the output fused
//   attention.kernel: cudnn                                      cudnn.cu
// The backward starts with one pass over dy, o and z that computes d_o, dz, delta and the sink's gradient, so
// that one attention backward serves all variants (src/ops/README.md). Not yet run on a GPU.
#include "attention/cudnn.h"
#include "attention/f32.h"
#include "attention/kernels.h"
#include "common/launch.h"
#include "common/math.cuh"
#include "ops/attention.h"
#include "sparse/attention.h"

namespace sluice::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 64;  // tokens per block

/// The output's arithmetic, forward and backward. Rows are (token, head); statistics are (H, T) f32.
template <class T>
struct OutputArguments {
  const T *o, *gate, *sink;  // gate, sink: may be null
  const float* lse;
  int64_t tokens;
  int heads, depth;
  bool headwise;
  GateActivation activation;
  GateCombine combine;
  T* y;  // forward
  const T* dy;
  T *d_o, *dgate;            // d_o null: not wanted, it is dy
  int64_t dgate_row;         // elements from one token's dgate to the next's
  const float* dlse;         // added to the sink's; may be null
  const double* dhead;       // (H): added to the gradient of a head's mean score; may be null
  float *delta, *dlse_sink;  // either, or both
  float* dsink_partial;      // (chunks, H): minus the sum over a chunk's tokens of the sink's dlse
};

/// The rows of a block: one head, kChunk tokens; kLanes lanes process a row, kVec elements each at a time.
template <int kLanes>
struct Rows {
  int lane = static_cast<int>(threadIdx.x) % kLanes, head = static_cast<int>(blockIdx.x);
  int64_t begin = static_cast<int64_t>(blockIdx.y) * kChunk;
  int first = static_cast<int>(threadIdx.x) / kLanes;
  static constexpr int kStep = kThreads / kLanes;
};

template <int kLanes>
DEVICE_INLINE float row_sum(float v) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset >>= 1) v += __shfl_xor_sync(kFullWarp, v, offset);
  return v;
}

/// y = gate(G o, z). Grid (H, chunks): neighbouring heads of a token, neighbours in memory, run at the same
/// time. Bound by memory: up to 16 bytes of o and of z in flight per thread.
template <class T, int kVec, int kLanes>
__global__ void __launch_bounds__(kThreads) attention_output_kernel(OutputArguments<T> a) {
  const Rows<kLanes> rows;
  for (int r = rows.first; r < kChunk && rows.begin + r < a.tokens; r += rows.kStep) {
    const int64_t token = rows.begin + r, row = token * a.heads + rows.head, at = row * a.depth;
    float share = 1, score = 0;
    if (a.sink) share = sigmoid(a.lse[rows.head * a.tokens + token] - to_float(a.sink[rows.head]));
    if (a.gate && a.headwise) {
      const float z = to_float(a.gate[row]);
      score = activate(a.activation, z, sigmoid(z));
    }
    for (int d = rows.lane * kVec; d < a.depth; d += kLanes * kVec) {
      Vec<T, kVec> x = load_vec<kVec>(a.o + at + d), z = {};
      if (a.gate && !a.headwise) z = load_vec<kVec>(a.gate + at + d);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        float v = share * to_float(x.v[e]);
        if (a.gate) {
          const float logit = to_float(z.v[e]);
          const float s = a.headwise ? score : activate(a.activation, logit, sigmoid(logit));
          v = a.combine == GateCombine::multiply ? v * s : v + s;
        }
        x.v[e] = from_float<T>(v);
      }
      store_vec<kVec>(a.y + at + d, x);
    }
  }
}

/// With u = dy s (multiply) or dy (add), or dy without a gate:
///   d_o = G u;   dz = a'(z) dy G o (multiply) or a'(z) dy (add), headwise summed over channels
///   the sink's dlse = G (1 - G) <u, o>, dsink = minus its sum;   delta = <d_o, o> - that - dlse
/// Grid as above. Bound by memory: dy, o, z read once, d_o, dz written once; 48 bytes in flight per thread.
template <class T, int kVec, int kLanes>
__global__ void __launch_bounds__(kThreads) attention_output_backward_kernel(OutputArguments<T> a) {
  const Rows<kLanes> rows;
  float sink_total = 0;
  // Every thread processes the same number of rows, because the sums below are collective.
  for (int r = rows.first; r < kChunk; r += rows.kStep) {
    const bool real = rows.begin + r < a.tokens;
    const int64_t token = real ? rows.begin + r : 0, row = token * a.heads + rows.head, at = row * a.depth;
    const int64_t statistic = rows.head * a.tokens + token;
    float share = 1, rest = 0, score = 1, slope = 0, of_head = 0;
    if (a.dhead)
      of_head = static_cast<float>(a.dhead[rows.head]) / static_cast<float>(a.headwise ? 1 : a.depth);
    if (a.sink) {
      const float x = a.lse[statistic] - to_float(a.sink[rows.head]);
      share = sigmoid(x), rest = sigmoid(-x);
    }
    const bool multiply = a.combine == GateCombine::multiply;
    if (a.gate && a.headwise) {
      const float z = to_float(a.gate[row]), s = sigmoid(z);
      score = activate(a.activation, z, s), slope = slope_of(a.activation, z, s);
    }
    float sum_uo = 0, sum_delta = 0, sum_dscore = 0;
    for (int d = rows.lane * kVec; d < a.depth && real; d += kLanes * kVec) {
      const Vec<T, kVec> dy = load_vec<kVec>(a.dy + at + d), o = load_vec<kVec>(a.o + at + d);
      Vec<T, kVec> z = {}, d_o;
      if (a.gate && !a.headwise) z = load_vec<kVec>(a.gate + at + d);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float g = to_float(dy.v[e]), x = to_float(o.v[e]);
        float u = g;
        if (a.gate) {
          const float dscore = multiply ? g * share * x : g;
          if (a.headwise) {
            sum_dscore += dscore;
          } else {
            const float logit = to_float(z.v[e]), s = sigmoid(logit);
            score = activate(a.activation, logit, s);
            z.v[e] = from_float<T>(slope_of(a.activation, logit, s) * (dscore + of_head));
          }
          if (multiply) u = g * score;
        }
        d_o.v[e] = from_float<T>(share * u);
        sum_uo += u * x;
        sum_delta += to_float(d_o.v[e]) * x;  // with the rounding that the attention's backward reads
      }
      if (a.d_o) store_vec<kVec>(a.d_o + at + d, d_o);
      if (a.gate && !a.headwise) store_vec<kVec>(a.dgate + token * a.dgate_row + rows.head * a.depth + d, z);
    }
    if (a.gate && a.headwise) {
      sum_dscore = row_sum<kLanes>(sum_dscore) + of_head;
      if (real && rows.lane == 0)
        a.dgate[token * a.dgate_row + rows.head] = from_float<T>(slope * sum_dscore);
    }
    float of_sink = 0;
    if (a.sink) of_sink = share * rest * row_sum<kLanes>(sum_uo);
    const float delta = row_sum<kLanes>(sum_delta);
    if (real && rows.lane == 0) {
      if (a.delta) a.delta[statistic] = delta - of_sink - (a.dlse ? a.dlse[statistic] : 0.0f);
      if (a.dlse_sink) a.dlse_sink[statistic] = of_sink;
      sink_total -= of_sink;
    }
  }
  if (a.sink) {
    sink_total = block_sum<kThreads>(sink_total);
    if (threadIdx.x == 0)
      a.dsink_partial[static_cast<int64_t>(blockIdx.y) * a.heads + rows.head] = sink_total;
  }
}

/// dsink_h += sum of its chunks. A warp per head, in a deterministic order; a few kilobytes.
__global__ void __launch_bounds__(32)
    attention_dsink_kernel(float* dsink, const float* partial, int chunks, int heads) {
  double total = 0;
  for (int c = static_cast<int>(threadIdx.x); c < chunks; c += 32)
    total += static_cast<double>(partial[static_cast<int64_t>(c) * heads + blockIdx.x]);
  total = warp_sum(total);
  if (threadIdx.x == 0) dsink[blockIdx.x] += static_cast<float>(total);
}

/// Whether vectors can be read of rows that are a multiple of 16 bytes long.
bool aligned_16(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 &&
         (t.contiguous() || t.stride() * dtype_size(t.dtype) % 16 == 0);
}

/// Whether vectors can be read of the gate's logits; headwise ones are read one by one.
bool gate_aligned(const AttentionOutput& output) {
  return !output.gate || output.gate.rank == 2 || aligned_16(output.gate);
}

/// Calls f(vector width, lanes per row) for rows of `depth` elements.
template <class T, class F>
void dispatch_rows(int depth, bool vectors, F&& f) {
  constexpr int kWidth = kVecWidth<T>;
  if (!vectors || depth % kWidth != 0)
    f(std::integral_constant<int, 1>(), std::integral_constant<int, 32>());
  else if (depth <= 8 * kWidth)
    f(std::integral_constant<int, kWidth>(), std::integral_constant<int, 8>());
  else if (depth <= 16 * kWidth)
    f(std::integral_constant<int, kWidth>(), std::integral_constant<int, 16>());
  else
    f(std::integral_constant<int, kWidth>(), std::integral_constant<int, 32>());
}

int64_t chunks_of(int64_t tokens) { return (tokens + kChunk - 1) / kChunk; }

/// The sink and the gate of an output as arguments; either may be absent.
template <class T>
OutputArguments<T> output_arguments(const Tensor& o, const Tensor& lse, const AttentionOutput& output) {
  OutputArguments<T> a = {};
  a.o = device_data<T>(o), a.lse = device_data<float>(lse);
  a.sink = output.sink ? device_data<T>(output.sink) : nullptr;
  a.gate = output.gate ? device_data<T>(output.gate) : nullptr;
  a.tokens = o.dim(0), a.heads = static_cast<int>(o.dim(1)), a.depth = static_cast<int>(o.dim(2));
  a.headwise = output.gate && output.gate.rank == 2;
  a.activation = output.kind.activation, a.combine = output.kind.combine;
  return a;
}

dim3 output_grid(const Tensor& o) {
  return dim3(static_cast<unsigned>(o.dim(1)), static_cast<unsigned>(chunks_of(o.dim(0))));
}

void output_forward(Context& ctx, const Tensor& y, const Tensor& o, const Tensor& lse,
                    const AttentionOutput& output) {
  if (ctx.dry_run || o.numel() == 0) return;
  dispatch_storage("gated_attention_forward", o, [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    OutputArguments<T> a = output_arguments<T>(o, lse, output);
    a.y = device_data<T>(y);
    const bool vectors = aligned_16(o) && aligned_16(y) && gate_aligned(output);
    dispatch_rows<T>(a.depth, vectors, [&](auto width, auto lanes) {
      constexpr int kVec = width, kLanes = lanes;
      launch(ctx, "attention_output", {output_grid(o), dim3(kThreads)},
             attention_output_kernel<T, kVec, kLanes>, a);
    });
  });
}

/// Where the backward of the output leaves things; absent tensors are not wanted.
struct OutputGradients {
  Tensor d_o, dgate, dsink, delta, dlse_sink;
};

/// dlse: empty, or what reaches lse past the output.
void output_backward(Context& ctx, const OutputGradients& out, const Tensor& dy, const Tensor& o,
                     const Tensor& lse, const AttentionOutput& output, const Tensor& dlse) {
  const auto& [sink, gate, kind, dhead, extra] = output;
  const int64_t chunks = chunks_of(o.dim(0));
  ScratchScope temporaries(ctx.scratch);
  const Tensor partial =
      temporaries.alloc("attention.dsink_partial", DType::f32, {sink ? chunks : 0, o.dim(1)});
  if (ctx.dry_run || o.numel() == 0) return;
  dispatch_storage("gated_attention_backward", o, [&](auto* storage) {
    using T = std::remove_pointer_t<decltype(storage)>;
    OutputArguments<T> a = output_arguments<T>(o, lse, output);
    a.dy = device_data<T>(dy);
    a.d_o = out.d_o ? device_data<T>(out.d_o) : nullptr;
    if (gate) a.dgate = device_data<T>(out.dgate), a.dgate_row = out.dgate.stride();
    a.dlse = dlse ? device_data<float>(dlse) : nullptr;
    a.dhead = dhead ? device_data<double>(dhead) : nullptr;
    a.delta = out.delta ? device_data<float>(out.delta) : nullptr;
    a.dlse_sink = out.dlse_sink ? device_data<float>(out.dlse_sink) : nullptr;
    a.dsink_partial = device_data<float>(partial);
    const bool vectors = aligned_16(o) && aligned_16(dy) && (!out.d_o || aligned_16(out.d_o)) &&
                         gate_aligned(output) && (!gate || a.headwise || aligned_16(out.dgate));
    dispatch_rows<T>(a.depth, vectors, [&](auto width, auto lanes) {
      constexpr int kVec = width, kLanes = lanes;
      launch(ctx, "attention_output_backward", {output_grid(o), dim3(kThreads)},
             attention_output_backward_kernel<T, kVec, kLanes>, a);
    });
    if (sink)
      launch(ctx, "attention_dsink", {dim3(static_cast<unsigned>(a.heads)), dim3(32)}, attention_dsink_kernel,
             device_data<float>(out.dsink), device_data<float>(partial), static_cast<int>(chunks), a.heads);
  });
}

// ---- selection of the kernel

/// The tensor-core kernels: softmax, bf16, rows of 16-byte vectors, and a scale that keeps the order of the
/// scores.
bool tensor_cores(const AttentionInputs& in) {
  const int64_t depth = in.q.dim(2);
  return in.weights == AttentionWeights::softmax && in.q.dtype == DType::bf16 &&
         (depth == 64 || depth == 128 || depth == 256) && in.scale > 0;
}

/// f32.cu computes what the tensor-core kernels do not support; where one is named, it is refused instead.
void require_automatic(AttentionKernel wish) {
  if (wish != AttentionKernel::automatic)
    fail(ExitCode::usage,
         "attention.kernel: mma, hopper and cudnn take softmax, bf16, a head_dim of 64, 128 or 256 and "
         "16-byte alignment only; use auto");
}

AttentionKernel choose(Context& ctx, const char* op, const Tensor& q, AttentionKernel wish) {
  const int depth = static_cast<int>(q.dim(2));
  if (wish == AttentionKernel::mma || wish == AttentionKernel::cudnn) return wish;
  const bool hopper = compute_capability(ctx) == 90 && attention_hopper_supports(depth);
  if (wish == AttentionKernel::hopper && !hopper)
    fail(ExitCode::usage,
         "{}: attention.kernel: hopper needs a GPU of compute capability 9.0 and a supported head_dim; "
         "this is {}.{} with head_dim {}",
         op, compute_capability(ctx) / 10, compute_capability(ctx) % 10, depth);
  return hopper ? AttentionKernel::hopper : AttentionKernel::mma;
}

/// Scratch memory depends only on shapes, never on the GPU: every kernel that might be selected allocates its
/// scratch without computing.
template <class F>
void reserve(Context& ctx, AttentionKernel wish, int head_dim, F&& run) {
  struct Restored {  // cuDNN may refuse
    Context& ctx;
    bool dry;
    ~Restored() { ctx.dry_run = dry; }
  } restored{ctx, ctx.dry_run};
  ctx.dry_run = true;
  if (wish == AttentionKernel::cudnn) {
    run(AttentionKernel::cudnn);
  } else {
    run(AttentionKernel::mma);
    if (attention_hopper_supports(head_dim)) run(AttentionKernel::hopper);
  }
}

void run_forward(Context& ctx, AttentionKernel kernel, const AttentionForward& a) {
  if (kernel == AttentionKernel::cudnn)
    attention_cudnn_forward(ctx, a);
  else if (kernel == AttentionKernel::hopper)
    attention_hopper_forward(ctx, a);
  else
    attention_mma_forward(ctx, a);
}

/// Whether the rows that queries were made from can be read and written by vectors.
bool aligned_16(const PositionBackward& made) {
  bool vectors = true;
  for (const Tensor* t : {&made.dx, &made.x, &made.weight, &made.cos, &made.sin})
    vectors = vectors && aligned_16(*t);
  return vectors;
}

/// To the gradient of what the queries were made from, if they were (AttentionGrads::queries).
void run_backward(Context& ctx, AttentionKernel kernel, AttentionBackward a, const AttentionGrads& grads) {
  const PositionBackward* const made = grads.queries ? &*grads.queries : nullptr;
  if (kernel == AttentionKernel::hopper && made && aligned_16(*made)) {
    a.made = made;
    return attention_hopper_backward(ctx, a);
  }
  if (kernel == AttentionKernel::cudnn)
    attention_cudnn_backward(ctx, a);
  else if (kernel == AttentionKernel::hopper)
    attention_hopper_backward(ctx, a);
  else
    attention_mma_backward(ctx, a);
  if (made) position_backward(ctx, *made, grads.dq);
}

/// Attention with its output in one; y is empty for plain attention, and then there is no output. A gate is
/// specific to a head, with one logit per token.
void fused_forward(Context& ctx, const char* op, const Tensor& y, const AttentionState& out,
                   const AttentionInputs& in, const AttentionOutput& output, AttentionKernel wish) {
  const auto& [q, k, v, first_key, scale, weights, own_key] = in;
  ScratchScope temporaries(ctx.scratch);
  const VisibleKeys visible = visible_keys(ctx, temporaries, first_key, own_key, k.dim(0));
  const auto in_f32 = [&] {
    require_automatic(wish);
    attention_f32_forward(ctx, out, in, visible);
    if (y) output_forward(ctx, y, out.o, out.lse, output);
  };
  if (!tensor_cores(in)) return in_f32();
  AttentionForward a = {};
  a.q = device_data<nv_bf16>(q), a.k = device_data<nv_bf16>(k), a.v = device_data<nv_bf16>(v);
  a.visible = visible;
  a.o = device_data<nv_bf16>(out.o), a.lse = device_data<float>(out.lse),
  a.z0 = out.z0 ? device_data<float>(out.z0) : nullptr;
  a.queries = q.dim(0), a.keys = k.dim(0), a.scale = static_cast<float>(scale);
  a.heads = static_cast<int>(q.dim(1)), a.kv_heads = static_cast<int>(k.dim(1)),
  a.head_dim = static_cast<int>(q.dim(2));
  const bool fuse = y && wish != AttentionKernel::cudnn;
  if (fuse) {
    a.y = device_data<nv_bf16>(y);
    a.sink = output.sink ? device_data<nv_bf16>(output.sink) : nullptr;
    a.gate = output.gate ? device_data<nv_bf16>(output.gate) : nullptr;
    a.headwise = output.gate && output.gate.rank == 2;
    a.kind = output.kind;
  }
  reserve(ctx, wish, a.head_dim, [&](AttentionKernel kernel) { run_forward(ctx, kernel, a); });
  if (!ctx.dry_run) {
    bool vectors = true;
    for (const Tensor* t : {&q, &k, &v, &out.o}) vectors = vectors && aligned_16(*t);
    if (y) vectors = vectors && aligned_16(y) && gate_aligned(output);
    if (!vectors) return in_f32();
    run_forward(ctx, choose(ctx, op, q, wish), a);
  }
  if (y && !fuse) output_forward(ctx, y, out.o, out.lse, output);
}

/// The attention's backward behind the output's, on to what the queries were made from: d_o and delta (H, T)
/// are known. has_dlse: whether delta holds more than <dO_t, O_t>.
void core_backward(Context& ctx, const char* op, const AttentionGrads& grads, const Tensor& d_o,
                   const Tensor& delta, const AttentionInputs& in, const AttentionState& state,
                   const Tensor& coef0, bool has_dlse, AttentionKernel wish) {
  const auto& [q, k, v, first_key, scale, weights, own_key] = in;
  ScratchScope temporaries(ctx.scratch);
  const VisibleKeys visible = visible_keys(ctx, temporaries, first_key, own_key, k.dim(0));
  const auto in_f32 = [&] {
    require_automatic(wish);
    attention_f32_backward(ctx, grads, d_o, delta, in, visible, state.lse, coef0);
    if (grads.queries) position_backward(ctx, *grads.queries, grads.dq);
  };
  if (!tensor_cores(in)) return in_f32();
  AttentionBackward a = {};
  a.q = device_data<nv_bf16>(q), a.k = device_data<nv_bf16>(k), a.v = device_data<nv_bf16>(v);
  a.d_o = device_data<nv_bf16>(d_o), a.lse = device_data<float>(state.lse),
  a.delta = device_data<float>(delta);
  a.coef0 = coef0 ? device_data<float>(coef0) : nullptr;
  a.o = device_data<nv_bf16>(state.o), a.has_dlse = has_dlse;
  a.visible = visible;
  a.dq = device_data<nv_bf16>(grads.dq), a.dk = device_data<nv_bf16>(grads.dk),
  a.dv = device_data<nv_bf16>(grads.dv), a.dv_row = grads.dv.stride();
  a.queries = q.dim(0), a.keys = k.dim(0), a.scale = static_cast<float>(scale);
  a.heads = static_cast<int>(q.dim(1)), a.kv_heads = static_cast<int>(k.dim(1)),
  a.head_dim = static_cast<int>(q.dim(2));
  reserve(ctx, wish, a.head_dim, [&](AttentionKernel kernel) { run_backward(ctx, kernel, a, grads); });
  if (ctx.dry_run) return;
  bool vectors = true;
  for (const Tensor* t : {&q, &k, &v, &d_o, &grads.dq, &grads.dk, &grads.dv})
    vectors = vectors && aligned_16(*t);
  if (!vectors) return in_f32();
  run_backward(ctx, choose(ctx, op, q, wish), a, grads);
}

/// Gates that the kernels do not fuse: scores shared over heads, or one row of logits for all tokens, whose
/// gradient is a parameter gradient.
bool composed(const AttentionOutput& output, const Tensor& o) {
  return output.gate && (output.kind.sharing != GateSharing::specific || output.gate.dim(0) != o.dim(0));
}

}  // namespace

void attention_forward(Context& ctx, const AttentionState& out, const AttentionInputs& in,
                       AttentionKernel kernel) {
  fused_forward(ctx, "attention_forward", {}, out, in, {}, kernel);
}

void attention_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o,
                        const AttentionInputs& in, const AttentionState& state, const ScoreGrads& of_scores,
                        AttentionKernel kernel) {
  ScratchScope temporaries(ctx.scratch);
  OutputGradients out;
  out.delta = temporaries.alloc("attention.delta", DType::f32, {in.q.dim(1), in.q.dim(0)});
  if (kernel != AttentionKernel::cudnn)  // which computes its own
    output_backward(ctx, out, d_o, state.o, state.lse, {}, of_scores.dlse);
  core_backward(ctx, "attention_backward", grads, d_o, out.delta, in, state, of_scores.coef0,
                bool(of_scores.dlse), kernel);
}

void sparse_attention_forward(Context& ctx, const AttentionState& out, const AttentionInputs& in,
                              const Selection& keys) {
  if (in.q.numel() == 0) return;
  ScratchScope temporaries(ctx.scratch);
  const VisibleKeys visible = visible_keys(ctx, temporaries, in.first_key, in.own_key, in.k.dim(0));
  if (sparse_tensor_cores(in) && aligned_16(out.o))
    sparse_union_forward(ctx, out, in, visible, keys);
  else if (!ctx.dry_run)
    attention_f32_forward(ctx, out, in, visible, &keys);
}

void sparse_attention_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o,
                               const AttentionInputs& in, const AttentionState& state, const Selection& keys,
                               const ScoreGrads& of_scores) {
  ScratchScope temporaries(ctx.scratch);
  OutputGradients out;
  out.delta = temporaries.alloc("attention.delta", DType::f32, {in.q.dim(1), in.q.dim(0)});
  output_backward(ctx, out, d_o, state.o, state.lse, {}, of_scores.dlse);
  if (in.q.numel() == 0) return;
  const VisibleKeys visible = visible_keys(ctx, temporaries, in.first_key, in.own_key, in.k.dim(0));
  bool vectors = true;
  for (const Tensor* t : {&d_o, &grads.dq, &grads.dk, &grads.dv}) vectors = vectors && aligned_16(*t);
  if (sparse_tensor_cores(in) && vectors)
    sparse_union_backward(ctx, grads, d_o, out.delta, in, visible, state.lse, of_scores.coef0, keys);
  else if (!ctx.dry_run)
    attention_f32_backward(ctx, grads, d_o, out.delta, in, visible, state.lse, of_scores.coef0, &keys);
}

void gated_attention_forward(Context& ctx, Tensor y, const AttentionState& out, const AttentionInputs& in,
                             const AttentionOutput& output, AttentionKernel kernel) {
  const char* op = "gated_attention_forward";
  if (!composed(output, out.o)) return fused_forward(ctx, op, y, out, in, output, kernel);
  fused_forward(ctx, op, {}, out, in, {}, kernel);
  if (output.sink) output_forward(ctx, y, out.o, out.lse, {.sink = output.sink});
  gate_forward(ctx, y, output.sink ? y : out.o, output.gate, output.kind);
}

void gated_attention_backward(Context& ctx, const AttentionGrads& grads, const Tensor& dy,
                              const AttentionInputs& in, const AttentionState& state,
                              const AttentionOutput& output, const ScoreGrads& of_scores,
                              AttentionKernel kernel) {
  ScratchScope temporaries(ctx.scratch);
  const auto& [o, lse, z0] = state;
  const AttentionOutput sink = {.sink = output.sink};
  OutputGradients out;
  out.delta = temporaries.alloc("attention.delta", DType::f32, {in.q.dim(1), in.q.dim(0)});
  out.dsink = grads.dsink;
  Tensor d = dy;
  if (output.sink || output.gate) d = out.d_o = temporaries.like("attention.d_o", o);
  // With one token a gate's row and a parameter differ only in the dtype of the gradient.
  if (composed(output, o) || (output.gate && grads.dgate.dtype != output.gate.dtype)) {
    ScratchScope inner(ctx.scratch);
    Tensor gated = o;
    if (output.sink) {
      gated = inner.like("attention.o_sink", o);
      output_forward(ctx, gated, o, lse, sink);
    }
    gate_backward(ctx, d, grads.dgate, dy, gated, output.gate, output.kind, output.dhead);
    output_backward(ctx, out, d, o, lse, sink, of_scores.dlse);
  } else {
    out.dgate = grads.dgate;
    output_backward(ctx, out, dy, o, lse, output, of_scores.dlse);
  }
  core_backward(ctx, "gated_attention_backward", grads, d, out.delta, in, state, of_scores.coef0,
                of_scores.dlse || output.sink, kernel);
}

void sink_forward(Context& ctx, Tensor y, const Tensor& o, const Tensor& lse, const Tensor& sink) {
  output_forward(ctx, y, o, lse, {.sink = sink});
}

void sink_backward(Context& ctx, Tensor d_o, Tensor dlse, Tensor dsink, const Tensor& dy, const Tensor& o,
                   const Tensor& lse, const Tensor& sink) {
  OutputGradients out;
  out.d_o = d_o, out.dlse_sink = dlse, out.dsink = dsink;
  output_backward(ctx, out, dy, o, lse, {.sink = sink}, {});
}

}  // namespace sluice::cuda
