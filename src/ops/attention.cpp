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

/// q (Tq, H, D), k and v (Tk, Hkv, D), first_key (Tq).
void check_heads(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& first_key) {
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
}

void check_sink(const char* op, const Tensor& o, const Tensor& lse, const Tensor& sink) {
  check_floating(op, "o", o);
  SLUICE_CHECK(o.rank == 3, "{}: o must be (T, H, D), got {}", op, o.describe());
  check_tensor(op, "lse", lse, accumulate_dtype(o.dtype), {o.dim(1), o.dim(0)});
  check_tensor(op, "sink", sink, o.dtype, {o.dim(1)});
}

void check_kernel(const char* op, const Context& ctx, AttentionKernel kernel) {
  if (kernel != AttentionKernel::automatic && ctx.device == Device::cpu)
    fail(ExitCode::usage, "{}: attention.kernel names a GPU kernel, but the device is the CPU; use auto", op);
}

void check_forward(const char* op, const Context& ctx, const Tensor& o, const Tensor& lse, const Tensor& z0,
                   const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& first_key,
                   AttentionKernel kernel) {
  check_heads(op, q, k, v, first_key);
  check_kernel(op, ctx, kernel);
  const DType statistics = accumulate_dtype(q.dtype);
  check_like(op, "o", o, q);
  check_tensor(op, "lse", lse, statistics, {q.dim(1), q.dim(0)});
  if (z0) check_tensor(op, "z0", z0, statistics, {q.dim(1), q.dim(0)});
}

void check_backward(const char* op, const Context& ctx, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                    const Tensor& d_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                    const Tensor& lse, const Tensor& first_key, const Tensor& dlse, const Tensor& coef0,
                    AttentionKernel kernel) {
  check_heads(op, q, k, v, first_key);
  check_kernel(op, ctx, kernel);
  const int64_t tokens = q.dim(0), heads = q.dim(1);
  const DType statistics = accumulate_dtype(q.dtype);
  SLUICE_CHECK(k.dim(0) == tokens, "{}: {} queries and {} keys must be equally many", op, tokens, k.dim(0));
  check_like(op, "dq", dq, q);
  check_like(op, "dk", dk, k);
  check_like(op, "dv", dv, v);
  check_like(op, "the output's gradient", d_out, q);
  check_like(op, "o", o, q);
  check_tensor(op, "lse", lse, statistics, {heads, tokens});
  if (dlse) check_tensor(op, "dlse", dlse, statistics, {heads, tokens});
  if (coef0) check_tensor(op, "coef0", coef0, statistics, {heads, tokens});
}

}  // namespace

void attention_forward(Context& ctx, Tensor o, Tensor lse, Tensor z0, const Tensor& q, const Tensor& k,
                       const Tensor& v, const Tensor& first_key, double scale, AttentionKernel kernel) {
  check_forward("attention_forward", ctx, o, lse, z0, q, k, v, first_key, kernel);
  SLUICE_DISPATCH(attention_forward, ctx, o, lse, z0, q, k, v, first_key, scale, kernel);
}

void attention_backward(Context& ctx, Tensor dq, Tensor dk, Tensor dv, const Tensor& d_o, const Tensor& q,
                        const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                        const Tensor& first_key, double scale, const Tensor& dlse, const Tensor& coef0,
                        AttentionKernel kernel) {
  check_backward("attention_backward", ctx, dq, dk, dv, d_o, q, k, v, o, lse, first_key, dlse, coef0, kernel);
  SLUICE_DISPATCH(attention_backward, ctx, dq, dk, dv, d_o, q, k, v, o, lse, first_key, scale, dlse, coef0,
                  kernel);
}

void gated_attention_forward(Context& ctx, Tensor y, Tensor o, Tensor lse, Tensor z0, const Tensor& q,
                             const Tensor& k, const Tensor& v, const Tensor& first_key, double scale,
                             const AttentionOutput& output, AttentionKernel kernel) {
  check_forward("gated_attention_forward", ctx, o, lse, z0, q, k, v, first_key, kernel);
  check_like("gated_attention_forward", "y", y, o);
  if (output.sink) check_sink("gated_attention_forward", o, lse, output.sink);
  SLUICE_DISPATCH_CUDA_ONLY(gated_attention_forward, ctx, y, o, lse, z0, q, k, v, first_key, scale, output,
                            kernel);
  attention_forward(ctx, o, lse, z0, q, k, v, first_key, scale);
  if (output.sink) sink_forward(ctx, y, o, lse, output.sink);
  if (output.gate) gate_forward(ctx, y, output.sink ? y : o, output.gate, output.kind);
  if (!output.sink && !output.gate) cast(ctx, y, o);
}

void gated_attention_backward(Context& ctx, Tensor dq, Tensor dk, Tensor dv, Tensor dgate, Tensor dsink,
                              const Tensor& dy, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& o, const Tensor& lse, const Tensor& first_key, double scale,
                              const AttentionOutput& output, const Tensor& dlse, const Tensor& coef0,
                              AttentionKernel kernel) {
  const char* op = "gated_attention_backward";
  check_backward(op, ctx, dq, dk, dv, dy, q, k, v, o, lse, first_key, dlse, coef0, kernel);
  if (output.sink) {
    check_sink(op, o, lse, output.sink);
    check_tensor(op, "dsink", dsink, lse.dtype, {o.dim(1)});
  }
  if (output.gate) check_count(op, "dgate", dgate, dgate.dtype, output.gate.numel());
  if (output.dhead) {
    check_tensor(op, "dhead", output.dhead, DType::f64, {o.dim(1)});
    SLUICE_CHECK(output.gate && output.kind.sharing == GateSharing::specific,
                 "{}: dhead is for a gate's scores, specific to a head", op);
  }
  SLUICE_DISPATCH_CUDA_ONLY(gated_attention_backward, ctx, dq, dk, dv, dgate, dsink, dy, q, k, v, o, lse,
                            first_key, scale, output, dlse, coef0, kernel);
  ScratchScope t(ctx.scratch);
  Tensor d = dy, dlse_all = dlse;
  if (output.gate) {
    d = t.like("gated_attention.d_o", o);
    Tensor gated = o;
    if (output.sink) {
      gated = t.like("gated_attention.o_sink", o);
      sink_forward(ctx, gated, o, lse, output.sink);
    }
    gate_backward(ctx, d, dgate, dy, gated, output.gate, output.kind, output.dhead);
  }
  if (output.sink) {
    const Tensor d_o = output.gate ? d : t.like("gated_attention.d_o", o);
    dlse_all = t.like("gated_attention.dlse", lse);
    sink_backward(ctx, d_o, dlse_all, dsink, d, o, lse, output.sink);
    if (dlse) add_forward(ctx, dlse_all, dlse_all, dlse);
    d = d_o;
  }
  attention_backward(ctx, dq, dk, dv, d, q, k, v, o, lse, first_key, scale, dlse_all, coef0);
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
