#pragma once
// Causal softmax attention with grouped query heads, blocked with an online softmax, without a T by T matrix.
//   z_tj = scale <q_t, k_j>,  first_key_t <= j <= t + Tk - Tq;   A = softmax_j(z);   o_t^h = sum_j A_tj
//   v_j^{g(h)}
// g(h) = h / (H / Hkv). (FlashAttention-2, Dao 2023, algorithms 1 and 2; README.md.)
// Tq query tokens, Tk >= Tq key tokens (equal in training; Tk > Tq with a cache of earlier keys), H query
// heads, Hkv key/value heads, D head_dim. Queries are the last Tq of the Tk tokens. first_key (Tq) i32 is the
// first key a query sees: the start of its sequence, or of its document; it does not decrease, and
// first_key_t <= t + Tk - Tq. (So it serves sliding windows as well: ops/window.h.)
// Softpick (Zuhri et al. 2025, arXiv 2504.20966; the authors' flash_softpick_attn.py) weighs by
//   A_tj = relu(e^z_tj - 1) / (sum_j |e^z_tj - 1| + eps)   instead, eps = kSoftpickEps.
// Its "lse" is the logarithm of the denominator, and its z0 that of the first key's numerator (-inf where
// that is 0), so that exp(z0 - lse) is the attention on the first key either way. (The authors' code
// multiplies eps by e^max z.)
#include <optional>

#include "core/context.h"
#include "ops/extra_key.h"
#include "ops/gate.h"
#include "ops/norm_rope.h"

namespace sluice {

constexpr double kSoftpickEps = 1e-6;

/// The inputs of attention.
struct AttentionInputs {
  Tensor q;          // (Tq, H, D)
  Tensor k, v;       // (Tk, Hkv, D)
  Tensor first_key;  // (Tq) i32
  double scale = 1;
  AttentionWeights weights = AttentionWeights::softmax;
  /// (Tq) i32, ascending: which key is query t's own token, where the queries are not the last of the keys
  /// but any of them (several ranks share a sequence). first_key_t is then relative to the query, as if key t
  /// were its own: query t sees the keys own_t - (t - first_key_t) <= j <= own_t. Or empty.
  Tensor own_key = {};
};

/// The outputs of forward, all overwritten. lse and z0 have accumulate_dtype(q). First-token attention,
/// implicit gates and sinks follow from both: A_t,first = exp(z0 - lse).
struct AttentionState {
  Tensor o;    // (Tq, H, D)
  Tensor lse;  // (H, Tq): log sum_j exp z_tj over the visible keys
  Tensor z0 =
      {};  // (H, Tq), or empty: the logit of key first_key_t, by the arithmetic of lse, so that z0 <= lse
};

/// Gradients of the inputs, overwritten, and of the members of AttentionOutput.
struct AttentionGrads {
  Tensor dq;          // (Tq, H, D)
  Tensor dk, dv;      // (Tk, Hkv, D); dv may be columns of a matrix
  Tensor dgate = {};  // the shape and dtype of the gate's logits, overwritten; may be columns of a matrix;
                      // empty without a gate
  Tensor dsink = {};  // (H) of accumulate_dtype, added to; empty without a sink
  Tensor dextra_key = {}, dextra_value = {};  // (Hx, D) of accumulate_dtype, added to; empty likewise
  /// How the queries were made: backward goes on to queries->dx, and what it leaves in dq is undefined. A
  /// kernel that sums dq in higher precision may do it before anything is rounded.
  std::optional<PositionBackward> queries = {};
  AttentionGrads without_queries() const {
    AttentionGrads g = *this;
    g.queries.reset();
    return g;
  }
};

/// Gradients that reach the scores directly instead of through the output; either may be empty.
struct ScoreGrads {
  Tensor dlse = {};   // (H, T): of lse; with an extra key, of lse - logits
  Tensor coef0 = {};  // (H, T): of z0: with softmax, added to the score gradient of the first visible key
};

void attention_forward(Context& ctx, const AttentionState& out, const AttentionInputs& in,
                       AttentionKernel kernel = AttentionKernel::automatic);

/// Gradients of forward with Tq == Tk, or with own_key, from d_o (Tq, H, D) and the state that forward left;
/// z0 is not read.
///   dS_tj = A_tj (<dO_t, v_j> - Delta_t),  Delta_t = <dO_t, O_t> - dlse_t;   plus coef0_t onto dS_t,first
/// softpick, with e = e^(z - lse):  dS = e (<dO_t, v_j> - Delta_t) where z > 0, e Delta_t where z < 0, else
/// 0;
///   plus coef0 / (1 - e^-z) onto dS_t,first where z > 0
/// Deterministic on a CPU; on a GPU with Context::deterministic.
void attention_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o,
                        const AttentionInputs& in, const AttentionState& state,
                        const ScoreGrads& of_scores = {},
                        AttentionKernel kernel = AttentionKernel::automatic);

/// Post-processing of o, fused into the kernels if the backend supports it:
///   y = gate(G o, z)  with G = sigmoid(lse - sink_h), or 1 without a sink, and gate as in ops/gate.h, or the
///   identity. With an extra key (ops/extra_key.h), which excludes a sink, y = gate(G o + (1 - G) value, z).
struct AttentionOutput {
  Tensor sink = {};  // (H), or empty
  Tensor gate = {};  // logits z (T, H, D) or (T, H), or empty; of q's dtype
  GateKind kind = {};
  Tensor dhead = {};  // (H) f64, or empty: read by backward alone, as gate_backward's; only with a gate
  ExtraKey extra = {};
};

/// As attention_forward; y (Tq, H, D) overwritten, may not alias out.o. `out` is that of the plain attention.
void gated_attention_forward(Context& ctx, Tensor y, const AttentionState& out, const AttentionInputs& in,
                             const AttentionOutput& output,
                             AttentionKernel kernel = AttentionKernel::automatic);

/// As attention_backward, from dy (T, H, D), the gradient of y. of_scores.dlse is added to what the sink
/// contributes.
void gated_attention_backward(Context& ctx, const AttentionGrads& grads, const Tensor& dy,
                              const AttentionInputs& in, const AttentionState& state,
                              const AttentionOutput& output, const ScoreGrads& of_scores = {},
                              AttentionKernel kernel = AttentionKernel::automatic);

/// Sink logit (GPT-OSS; README.md): a learned logit per head joins the softmax without a value, which is
///   y = G o,  G = sigmoid(lse - sink_h).   sink (H), lse (H, T), o and y (T, H, D); y may alias o.
void sink_forward(Context& ctx, Tensor y, const Tensor& o, const Tensor& lse, const Tensor& sink);

/// d_o (T, H, D) = G dy; dlse (H, T) = G (1 - G) <dy, o>, both overwritten; dsink (H) -= sum_t dlse
/// (accumulate_dtype, added to). d_o may alias dy.
void sink_backward(Context& ctx, Tensor d_o, Tensor dlse, Tensor dsink, const Tensor& dy, const Tensor& o,
                   const Tensor& lse, const Tensor& sink);

}  // namespace sluice
