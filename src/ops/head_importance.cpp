#include "ops/head_importance.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(head_importance)
SLUICE_DECLARE_BACKENDS(head_importance_backward)
SLUICE_DECLARE_BACKENDS(head_balance)

namespace sluice {
namespace {

/// The number of heads.
int64_t check_gate(const char* op, const HeadGate& g, int64_t tokens) {
  SLUICE_CHECK(int{bool(g.first_key)} + int{bool(g.sink)} + int{bool(g.logits)} == 1,
               "{}: exactly one of first_key, sink and logits must be given", op);
  if (g.targets) check_tensor(op, "targets", g.targets, DType::i32, {tokens});
  if (g.logits) {
    check_floating(op, "logits", g.logits);
    SLUICE_CHECK(
        (g.logits.rank == 2 || g.logits.rank == 3) && (g.logits.dim(0) == tokens || g.logits.dim(0) == 1),
        "{}: logits must be ({}, H, D) or ({}, H), or of one token, got {}", op, tokens, tokens,
        g.logits.describe());
    SLUICE_CHECK(measures_importance(g.kind),
                 "{}: only scores specific to a head, in [0, 1], that multiply measure its importance", op);
    return g.logits.dim(1);
  }
  SLUICE_CHECK(g.lse.rank == 2 && (g.lse.dtype == DType::f32 || g.lse.dtype == DType::f64),
               "{}: lse must be (H, T) f32 or f64, got {}", op, g.lse.describe());
  const int64_t heads = g.lse.dim(0);
  check_tensor(op, "lse", g.lse, g.lse.dtype, {heads, tokens});
  if (g.sink) {
    check_floating(op, "sink", g.sink);
    if (g.sink.rank == 2)
      check_like(op, "sink", g.sink, g.lse);
    else
      check_tensor(op, "sink", g.sink, g.sink.dtype, {heads});
    SLUICE_CHECK(accumulate_dtype(g.sink.dtype) == g.lse.dtype, "{}: sink {} does not go with lse {}", op,
                 g.sink.describe(), g.lse.describe());
  } else {
    check_tensor(op, "z0", g.z0, g.lse.dtype, {heads, tokens});
    check_tensor(op, "first_key", g.first_key, DType::i32, {tokens});
  }
  return heads;
}

}  // namespace

void head_importance(Context& ctx, Tensor batch, Tensor totals, const HeadGate& gate, int64_t tokens) {
  const int64_t size = head_row_size(check_gate("head_importance", gate, tokens));
  if (batch) check_tensor("head_importance", "batch", batch, DType::f64, {size});
  if (totals) check_tensor("head_importance", "totals", totals, DType::f64, {size});
  SLUICE_DISPATCH(head_importance, ctx, batch, totals, gate, tokens);
}

void head_importance_backward(Context& ctx, Tensor dlse, Tensor coef0, Tensor dsink, const Tensor& u,
                              const HeadGate& gate) {
  const char* op = "head_importance_backward";
  SLUICE_CHECK(!gate.logits, "{}: a gate's gradient goes through gate_backward", op);
  const int64_t heads = check_gate(op, gate, gate.lse.rank == 2 ? gate.lse.dim(1) : 0);
  check_tensor(op, "u", u, DType::f64, {heads});
  check_like(op, "dlse", dlse, gate.lse);
  if (gate.sink && gate.sink.rank == 2)
    SLUICE_CHECK(!dsink, "{}: logits by query have no gradient of their own", op);
  else if (gate.sink)
    check_tensor(op, "dsink", dsink, gate.lse.dtype, {heads});
  else
    check_like(op, "coef0", coef0, gate.lse);
  SLUICE_DISPATCH(head_importance_backward, ctx, dlse, coef0, dsink, u, gate);
}

void head_balance(Context& ctx, Tensor u, Tensor batch, Tensor totals, const Tensor& seen,
                  const Tensor& shared, const HeadBalance& balance) {
  const char* op = "head_balance";
  SLUICE_CHECK(u.rank == 2 && u.dtype == DType::f64, "{}: u must be (L, H) f64, got {}", op, u.describe());
  const int64_t layers = u.dim(0), heads = u.dim(1);
  check_tensor(op, "seen", seen, DType::f64, {layers, head_row_size(heads)});
  check_like(op, "batch", batch, seen);
  if (totals) check_like(op, "totals", totals, seen);
  if (shared) check_like(op, "shared", shared, u);
  SLUICE_CHECK(balance.ddof == 0 || balance.ddof == 1, "{}: ddof must be 0 or 1, got {}", op, balance.ddof);
  SLUICE_CHECK(heads <= kMaxHeads, "{}: {} heads; at most {}", op, heads, kMaxHeads);
  SLUICE_DISPATCH(head_balance, ctx, u, batch, totals, seen, shared, balance);
}

}  // namespace sluice
