#include "ops/attention.h"

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/elementwise.h"

SLUICE_DECLARE_BACKENDS(attention_forward)
SLUICE_DECLARE_BACKENDS(attention_backward)
SLUICE_DECLARE_BACKENDS(sink_forward)
SLUICE_DECLARE_BACKENDS(sink_backward)
SLUICE_DECLARE_CUDA(gated_attention_forward)
SLUICE_DECLARE_CUDA(gated_attention_backward)

namespace sluice {
namespace {

void check_inputs(const char* op, const AttentionInputs& in) {
  const auto& [q, k, v, first_key, scale, weights, own_key] = in;
  check_floating(op, "q", q);
  SLUICE_CHECK(q.rank == 3, "{}: q must be (Tq, H, D), got {}", op, q.describe());
  SLUICE_CHECK(k.rank == 3, "{}: k must be (Tk, Hkv, D), got {}", op, k.describe());
  const int64_t tk = k.dim(0), kv_heads = k.dim(1), depth = q.dim(2);
  SLUICE_CHECK(q.dim(0) >= 1 && q.dim(1) >= 1 && depth >= 1, "{}: q is empty, {}", op, q.describe());
  check_tensor(op, "k", k, q.dtype, {tk, kv_heads, depth});
  check_tensor(op, "v", v, q.dtype, {tk, kv_heads, depth});
  SLUICE_CHECK(kv_heads >= 1 && q.dim(1) % kv_heads == 0, "{}: {} query heads cannot share {} key heads", op,
               q.dim(1), kv_heads);
  SLUICE_CHECK(tk >= q.dim(0), "{}: {} queries but only {} keys", op, q.dim(0), tk);
  check_tensor(op, "first_key", first_key, DType::i32, {q.dim(0)});
  if (own_key) check_tensor(op, "own_key", own_key, DType::i32, {q.dim(0)});
}

void check_sink(const char* op, const Tensor& o, const Tensor& lse, const Tensor& sink) {
  check_floating(op, "o", o);
  SLUICE_CHECK(o.rank == 3, "{}: o must be (T, H, D), got {}", op, o.describe());
  check_tensor(op, "lse", lse, accumulate_dtype(o.dtype), {o.dim(1), o.dim(0)});
  check_tensor(op, "sink", sink, o.dtype, {o.dim(1)});
}

/// An extra key joins behind the kernel, and leaves no place for a sink.
void check_extra(const char* op, const AttentionOutput& output) {
  SLUICE_CHECK(!output.sink || !output.extra.key, "{}: a sink and an extra key exclude each other", op);
}

void check_kernel(const char* op, const Context& ctx, AttentionKernel kernel) {
  if (kernel != AttentionKernel::automatic && ctx.device == Device::cpu)
    fail(ExitCode::usage, "{}: attention.kernel names a GPU kernel, but the device is the CPU; use auto", op);
}

void check_forward(const char* op, const Context& ctx, const AttentionState& out, const AttentionInputs& in,
                   AttentionKernel kernel) {
  check_inputs(op, in);
  check_kernel(op, ctx, kernel);
  const DType statistics = accumulate_dtype(in.q.dtype);
  check_like(op, "o", out.o, in.q);
  check_tensor(op, "lse", out.lse, statistics, {in.q.dim(1), in.q.dim(0)});
  if (out.z0) check_tensor(op, "z0", out.z0, statistics, {in.q.dim(1), in.q.dim(0)});
}

void check_backward(const char* op, const Context& ctx, const AttentionGrads& grads, const Tensor& d_out,
                    const AttentionInputs& in, const AttentionState& state, const ScoreGrads& of_scores,
                    AttentionKernel kernel) {
  check_inputs(op, in);
  check_kernel(op, ctx, kernel);
  const int64_t tokens = in.q.dim(0), heads = in.q.dim(1), keys = in.k.dim(0);
  const DType statistics = accumulate_dtype(in.q.dtype);
  SLUICE_CHECK(keys == tokens || in.own_key, "{}: {} queries and {} keys must be equally many", op, tokens,
               keys);
  check_like(op, "dq", grads.dq, in.q);
  check_like(op, "dk", grads.dk, in.k);
  check_rows_like(op, "dv", grads.dv, in.v);
  check_like(op, "the output's gradient", d_out, in.q);
  check_like(op, "o", state.o, in.q);
  check_tensor(op, "lse", state.lse, statistics, {heads, tokens});
  if (of_scores.dlse) check_tensor(op, "dlse", of_scores.dlse, statistics, {heads, tokens});
  if (of_scores.coef0) check_tensor(op, "coef0", of_scores.coef0, statistics, {heads, tokens});
}

}  // namespace

void attention_forward(Context& ctx, const AttentionState& out, const AttentionInputs& in,
                       AttentionKernel kernel) {
  check_forward("attention_forward", ctx, out, in, kernel);
  SLUICE_DISPATCH(attention_forward, ctx, out, in, kernel);
}

void attention_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o,
                        const AttentionInputs& in, const AttentionState& state, const ScoreGrads& of_scores,
                        AttentionKernel kernel) {
  check_backward("attention_backward", ctx, grads, d_o, in, state, of_scores, kernel);
  if (grads.queries && ctx.device == Device::cpu) {  // a GPU's kernels may go on by themselves
    attention_backward(ctx, grads.without_queries(), d_o, in, state, of_scores, kernel);
    return position_backward(ctx, *grads.queries, grads.dq);
  }
  SLUICE_DISPATCH(attention_backward, ctx, grads, d_o, in, state, of_scores, kernel);
}

namespace {

void extra_key_attention_backward(Context& ctx, const AttentionGrads& grads, const Tensor& dy,
                                  const AttentionInputs& in, const AttentionState& state,
                                  const AttentionOutput& output, const ScoreGrads& of_scores,
                                  AttentionKernel kernel) {
  ScratchScope t(ctx.scratch);
  const Tensor &o = state.o, &lse = state.lse, d_o = t.like("gated_attention.d_o", o),
               dlse = t.like("gated_attention.dlse", lse);
  Tensor d = dy;
  if (output.gate) {
    const Tensor ungated = t.like("gated_attention.o_extra", o);
    extra_key_forward(ctx, ungated, o, lse, output.extra);
    gate_backward(ctx, d_o, grads.dgate, dy, ungated, output.gate, output.kind, output.dhead);
    d = d_o;
  }
  extra_key_backward(ctx, d_o, dlse, grads.dextra_value, d, o, lse, output.extra);
  if (of_scores.dlse) add_forward(ctx, dlse, dlse, of_scores.dlse);
  attention_backward(ctx, grads.without_queries(), d_o, in, state, {dlse, of_scores.coef0}, kernel);
  extra_key_logits_backward(ctx, grads.dq, grads.dextra_key, dlse, in.q, output.extra.key, in.scale);
  if (grads.queries) position_backward(ctx, *grads.queries, grads.dq);
}

}  // namespace

void gated_attention_forward(Context& ctx, Tensor y, const AttentionState& out, const AttentionInputs& in,
                             const AttentionOutput& output, AttentionKernel kernel) {
  check_forward("gated_attention_forward", ctx, out, in, kernel);
  check_like("gated_attention_forward", "y", y, out.o);
  if (output.sink) check_sink("gated_attention_forward", out.o, out.lse, output.sink);
  check_extra("gated_attention_forward", output);
  if (const ExtraKey& extra = output.extra; extra.key) {
    attention_forward(ctx, out, in, kernel);
    extra_key_logits(ctx, extra.logits, in.q, extra.key, in.scale);
    extra_key_forward(ctx, y, out.o, out.lse, extra);
    if (output.gate) gate_forward(ctx, y, y, output.gate, output.kind);
    return;
  }
  SLUICE_DISPATCH_CUDA_ONLY(gated_attention_forward, ctx, y, out, in, output, kernel);
  attention_forward(ctx, out, in);
  if (output.sink) sink_forward(ctx, y, out.o, out.lse, output.sink);
  if (output.gate) gate_forward(ctx, y, output.sink ? y : out.o, output.gate, output.kind);
  if (!output.sink && !output.gate) cast(ctx, y, out.o);
}

void gated_attention_backward(Context& ctx, const AttentionGrads& grads, const Tensor& dy,
                              const AttentionInputs& in, const AttentionState& state,
                              const AttentionOutput& output, const ScoreGrads& of_scores,
                              AttentionKernel kernel) {
  const char* op = "gated_attention_backward";
  const auto& [o, lse, z0] = state;
  check_backward(op, ctx, grads, dy, in, state, of_scores, kernel);
  if (output.sink) {
    check_sink(op, o, lse, output.sink);
    check_tensor(op, "dsink", grads.dsink, lse.dtype, {o.dim(1)});
  }
  if (output.gate)
    SLUICE_CHECK(grads.dgate.numel() == output.gate.numel(), "{}: dgate must be {}, got {}", op,
                 output.gate.describe(), grads.dgate.describe());
  if (output.dhead) {
    check_tensor(op, "dhead", output.dhead, DType::f64, {o.dim(1)});
    SLUICE_CHECK(output.gate && output.kind.sharing == GateSharing::specific,
                 "{}: dhead is for a gate's scores, specific to a head", op);
  }
  check_extra(op, output);
  if (output.extra.key)
    return extra_key_attention_backward(ctx, grads, dy, in, state, output, of_scores, kernel);
  SLUICE_DISPATCH_CUDA_ONLY(gated_attention_backward, ctx, grads, dy, in, state, output, of_scores, kernel);
  ScratchScope t(ctx.scratch);
  Tensor d = dy;
  ScoreGrads all = of_scores;
  if (output.gate) {
    d = t.like("gated_attention.d_o", o);
    Tensor gated = o;
    if (output.sink) {
      gated = t.like("gated_attention.o_sink", o);
      sink_forward(ctx, gated, o, lse, output.sink);
    }
    gate_backward(ctx, d, grads.dgate, dy, gated, output.gate, output.kind, output.dhead);
  }
  if (output.sink) {
    const Tensor d_o = output.gate ? d : t.like("gated_attention.d_o", o);
    all.dlse = t.like("gated_attention.dlse", lse);
    sink_backward(ctx, d_o, all.dlse, grads.dsink, d, o, lse, output.sink);
    if (of_scores.dlse) add_forward(ctx, all.dlse, all.dlse, of_scores.dlse);
    d = d_o;
  }
  attention_backward(ctx, grads, d, in, state, all);
}

void sink_forward(Context& ctx, Tensor y, const Tensor& o, const Tensor& lse, const Tensor& sink) {
  check_sink("sink_forward", o, lse, sink);
  check_like("sink_forward", "y", y, o);
  SLUICE_DISPATCH(sink_forward, ctx, y, o, lse, sink);
}

void sink_backward(Context& ctx, Tensor d_o, Tensor dlse, Tensor dsink, const Tensor& dy, const Tensor& o,
                   const Tensor& lse, const Tensor& sink) {
  check_sink("sink_backward", o, lse, sink);
  check_like("sink_backward", "d_o", d_o, o);
  check_like("sink_backward", "dy", dy, o);
  check_like("sink_backward", "dlse", dlse, lse);
  check_tensor("sink_backward", "dsink", dsink, lse.dtype, {o.dim(1)});
  SLUICE_DISPATCH(sink_backward, ctx, d_o, dlse, dsink, dy, o, lse, sink);
}

}  // namespace sluice
