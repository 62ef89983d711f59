#include "ops/sparse_attention.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(sparse_attention_forward)
SLUICE_DECLARE_BACKENDS(sparse_attention_backward)

namespace sluice {
namespace {

void check(const char* op, const AttentionInputs& in, const AttentionState& state, const Selection& keys) {
  check_floating(op, "q", in.q);
  SLUICE_CHECK(in.q.rank == 3 && in.k.rank == 3, "{}: q {} and k {} must be (Tq, H, D) and (Tk, Hkv, D)", op,
               in.q.describe(), in.k.describe());
  const int64_t tq = in.q.dim(0), heads = in.q.dim(1), tk = in.k.dim(0), kv_heads = in.k.dim(1);
  check_tensor(op, "k", in.k, in.q.dtype, {tk, kv_heads, in.q.dim(2)});
  check_tensor(op, "v", in.v, in.q.dtype, {tk, kv_heads, in.q.dim(2)});
  check_tensor(op, "first_key", in.first_key, DType::i32, {tq});
  if (in.own_key) check_tensor(op, "own_key", in.own_key, DType::i32, {tq});
  SLUICE_CHECK(tk >= tq && heads % kv_heads == 0, "{}: q {} does not go with k {}", op, in.q.describe(),
               in.k.describe());
  check_like(op, "o", state.o, in.q);
  check_tensor(op, "lse", state.lse, accumulate_dtype(in.q.dtype), {heads, tq});
  SLUICE_CHECK(keys.first.rank == 3 && keys.first.dim(0) >= 1 && kv_heads % keys.first.dim(0) == 0,
               "{}: selection {} does not go with {} key/value heads", op, keys.first.describe(), kv_heads);
  check_tensor(op, "selection", keys.first, DType::i32, {keys.first.dim(0), tq, keys.first.dim(2)});
  check_tensor(op, "selection's count", keys.count, DType::i32, {keys.first.dim(0), tq});
}

}  // namespace

void sparse_attention_forward(Context& ctx, const AttentionState& out, const AttentionInputs& in,
                              const Selection& keys) {
  check("sparse_attention_forward", in, out, keys);
  if (out.z0) check_like("sparse_attention_forward", "z0", out.z0, out.lse);
  SLUICE_DISPATCH(sparse_attention_forward, ctx, out, in, keys);
}

void sparse_attention_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o,
                               const AttentionInputs& in, const AttentionState& state, const Selection& keys,
                               const ScoreGrads& of_scores) {
  const char* op = "sparse_attention_backward";
  check(op, in, state, keys);
  SLUICE_CHECK(in.k.dim(0) == in.q.dim(0) || in.own_key, "{}: queries and keys must be equally many", op);
  check_like(op, "dq", grads.dq, in.q);
  check_like(op, "dk", grads.dk, in.k);
  check_like(op, "dv", grads.dv, in.v);
  check_like(op, "d_o", d_o, in.q);
  if (of_scores.dlse) check_like(op, "dlse", of_scores.dlse, state.lse);
  if (of_scores.coef0) check_like(op, "coef0", of_scores.coef0, state.lse);
  if (grads.queries) {
    sparse_attention_backward(ctx, grads.without_queries(), d_o, in, state, keys, of_scores);
    return position_backward(ctx, *grads.queries, grads.dq);
  }
  SLUICE_DISPATCH(sparse_attention_backward, ctx, grads, d_o, in, state, keys, of_scores);
}

}  // namespace sluice
