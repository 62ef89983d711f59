#pragma once
// Causal softmax attention with grouped query heads, blocked with an online softmax: no T by T matrix exists.
//   z_tj = scale <q_t, k_j>,  first_key_t <= j <= t + Tk - Tq;   A = softmax_j(z);   o_t^h = sum_j A_tj
//   v_j^{g(h)}
// g(h) = h / (H / Hkv). (FlashAttention-2, Dao 2023, algorithms 1 and 2; README.md.)
// Tq query tokens, Tk >= Tq key tokens (equal in training; Tk > Tq with a cache of earlier keys), H query
// heads, Hkv key/value heads, D head_dim. Queries are the last Tq of the Tk tokens. first_key (Tq) i32 is the
// first key a query sees: the start of its sequence, or of its document; it does not decrease, and
// first_key_t <= t + Tk - Tq.
#include "core/context.h"
#include "ops/gate.h"

namespace sluice {

/// o (Tq, H, D); lse (H, Tq) = log sum_j exp z_tj over the visible keys; z0 (H, Tq) = the logit of key
/// first_key_t, from the same arithmetic as lse so that z0 <= lse. All overwritten; lse, z0 have
/// accumulate_dtype(q). z0 may be empty. First-token attention, implicit gates and sinks follow from (lse,
/// z0): A_t,first = exp(z0 - lse).
void attention_forward(Context& ctx, Tensor o, Tensor lse, Tensor z0, const Tensor& q, const Tensor& k,
                       const Tensor& v, const Tensor& first_key, double scale,
                       AttentionKernel kernel = AttentionKernel::automatic);

/// Gradients of forward with Tq == Tk; dq (T, H, D), dk, dv (T, Hkv, D) overwritten.
///   dS_tj = A_tj (<dO_t, v_j> - Delta_t),  Delta_t = <dO_t, O_t> - dlse_t;   plus coef0_t onto dS_t,first
/// Optional (empty = absent): dlse (H, T), the gradient of lse; coef0 (H, T), added to the score gradient of
/// each query's first visible key. Deterministic on a CPU; on a GPU with Context::deterministic.
void attention_backward(Context& ctx, Tensor dq, Tensor dk, Tensor dv, const Tensor& d_o, const Tensor& q,
                        const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                        const Tensor& first_key, double scale, const Tensor& dlse, const Tensor& coef0,
                        AttentionKernel kernel = AttentionKernel::automatic);

/// What becomes of o before it leaves the attention, fused into the kernels where the backend can:
///   y = gate(G o, z)  with G = sigmoid(lse - sink_h), or 1 without a sink, and gate as in ops/gate.h, or the
///   identity.
struct AttentionOutput {
  Tensor sink;  // (H), or empty
  Tensor gate;  // logits z (T, H, D) or (T, H), or empty; of q's dtype
  GateKind kind = {};
  Tensor dhead;  // (H) f64, or empty: read by backward alone, as gate_backward's; only with a gate
};

/// As attention_forward; y (Tq, H, D) overwritten, may not alias o. o, lse, z0 are those of the plain
/// attention.
void gated_attention_forward(Context& ctx, Tensor y, Tensor o, Tensor lse, Tensor z0, const Tensor& q,
                             const Tensor& k, const Tensor& v, const Tensor& first_key, double scale,
                             const AttentionOutput& output,
                             AttentionKernel kernel = AttentionKernel::automatic);

/// Gradients of gated forward from dy (T, H, D). dq, dk, dv, and dgate (the shape and dtype of z)
/// overwritten; dsink (H) added to (accumulate_dtype). dgate and dsink are empty where output has none. dlse,
/// coef0 as in attention_backward: dlse is added to what the sink contributes.
void gated_attention_backward(Context& ctx, Tensor dq, Tensor dk, Tensor dv, Tensor dgate, Tensor dsink,
                              const Tensor& dy, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& o, const Tensor& lse, const Tensor& first_key, double scale,
                              const AttentionOutput& output, const Tensor& dlse, const Tensor& coef0,
                              AttentionKernel kernel = AttentionKernel::automatic);

/// Sink logit (GPT-OSS; README.md): a learned logit per head joins the softmax without a value, which is
///   y = G o,  G = sigmoid(lse - sink_h).   sink (H), lse (H, T), o and y (T, H, D); y may alias o.
void sink_forward(Context& ctx, Tensor y, const Tensor& o, const Tensor& lse, const Tensor& sink);

/// d_o (T, H, D) = G dy; dlse (H, T) = G (1 - G) <dy, o>, both overwritten; dsink (H) -= sum_t dlse
/// (accumulate_dtype, added to). d_o may alias dy.
void sink_backward(Context& ctx, Tensor d_o, Tensor dlse, Tensor dsink, const Tensor& dy, const Tensor& o,
                   const Tensor& lse, const Tensor& sink);

}  // namespace sluice
