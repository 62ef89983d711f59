#pragma once
// Switch heads (Gated Attention, Qiu et al. 2025, appendix A.1; after SwitchHead, Csordas et al. 2023): a
// head's value, or key, is a sum of a few of its experts' projections, each weighted by a sigmoid of its own;
// nothing is normalised.
//   chosen = the K largest of E logits z, largest first, ties to the lower id;  r_e = sigmoid(z_e)
//   v_c = sum over the chosen e that write channel c of r_e p_e,i     expert e writes channels (e w) mod D +
//   i, 0 <= i < w dp_e,i = r_e dv_c,   dz_e = r_e (1 - r_e) <dv, p_e>  of the chosen; 0 of the others
// T tokens, H heads, E experts of a head, K chosen, w channels of an expert, a divisor of the head's D.
// With E = K = 1 and w = D this is the headwise sigmoid gate of ops/gate.h, bit for bit.
#include "core/context.h"

namespace sluice {

/// v (T, H, D) and chosen (T, H, K) i32 overwritten, from logits (T, H, E) and projected (T, H, E, w), all of
/// one storage type. Sums are in f32 (f64). Channels that no chosen expert writes become 0. NaN among the
/// logits counts as largest. E <= kMaxExperts, K <= min(E, kMaxExpertsPerToken).
void switch_heads_forward(Context& ctx, Tensor v, Tensor chosen, const Tensor& logits,
                          const Tensor& projected);

/// dlogits (T, H, E) and dprojected (T, H, E, w) overwritten, from dv (T, H, D) and what forward saw and
/// chose.
void switch_heads_backward(Context& ctx, Tensor dlogits, Tensor dprojected, const Tensor& dv,
                           const Tensor& logits, const Tensor& projected, const Tensor& chosen);

}  // namespace sluice
