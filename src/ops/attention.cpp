#include "ops/attention.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(attention_forward)
SLUICE_DECLARE_BACKENDS(attention_backward)
SLUICE_DECLARE_BACKENDS(sink_forward)
SLUICE_DECLARE_BACKENDS(sink_backward)

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

}  // namespace

void attention_forward(Context& ctx, Tensor o, Tensor lse, Tensor z0, const Tensor& q, const Tensor& k,
                       const Tensor& v, const Tensor& first_key, double scale) {
  check_heads("attention_forward", q, k, v, first_key);
  const int64_t tokens = q.dim(0), heads = q.dim(1);
  const DType statistics = accumulate_dtype(q.dtype);
  check_like("attention_forward", "o", o, q);
  check_tensor("attention_forward", "lse", lse, statistics, {heads, tokens});
  if (z0) check_tensor("attention_forward", "z0", z0, statistics, {heads, tokens});
  SLUICE_DISPATCH(attention_forward, ctx, o, lse, z0, q, k, v, first_key, scale);
}

void attention_backward(Context& ctx, Tensor dq, Tensor dk, Tensor dv, const Tensor& d_o, const Tensor& q,
                        const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                        const Tensor& first_key, double scale, const Tensor& dlse, const Tensor& coef0) {
  check_heads("attention_backward", q, k, v, first_key);
  const int64_t tokens = q.dim(0), heads = q.dim(1);
  const DType statistics = accumulate_dtype(q.dtype);
  SLUICE_CHECK(k.dim(0) == tokens, "attention_backward: {} queries and {} keys must be equally many", tokens,
               k.dim(0));
  check_like("attention_backward", "dq", dq, q);
  check_like("attention_backward", "dk", dk, k);
  check_like("attention_backward", "dv", dv, v);
  check_like("attention_backward", "d_o", d_o, q);
  check_like("attention_backward", "o", o, q);
  check_tensor("attention_backward", "lse", lse, statistics, {heads, tokens});
  if (dlse) check_tensor("attention_backward", "dlse", dlse, statistics, {heads, tokens});
  if (coef0) check_tensor("attention_backward", "coef0", coef0, statistics, {heads, tokens});
  SLUICE_DISPATCH(attention_backward, ctx, dq, dk, dv, d_o, q, k, v, o, lse, first_key, scale, dlse, coef0);
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
