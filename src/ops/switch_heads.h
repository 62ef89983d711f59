#pragma once
// Switch heads (Gated Attention, Qiu et al. 2025, appendix A.1; after SwitchHead, Csordas et al. 2023): the
// value or key of a head is the sum of K of its E expert projections, each weighted by its own sigmoid
// without normalisation.
//   chosen = the K largest of E logits z, largest first, ties to the lower index;  r_e = sigmoid(z_e)
//   v_c = sum of r_e p_e,i over the chosen e that write channel c = ((e w) mod D) + i, 0 <= i < w
//   dp_e,i = r_e dv_c,  dz_e = r_e (1 - r_e) <dv, p_e> for the chosen experts; 0 for the others
// T tokens, H heads, E experts per head, K chosen, w channels per expert (a divisor of the head's D).
// With E = K = 1 and w = D this is the headwise sigmoid gate of ops/gate.h, bit for bit.
#include "core/context.h"

namespace sluice {

/// v (T, H, D) and chosen (T, H, K) i32 are overwritten, from logits (T, H, E) and projected (T, H, E, w),
/// all of one storage type. Sums are in f32 (f64). Channels that no chosen expert writes become 0. NaN logits
/// count as largest. E <= kMaxExperts, K <= min(E, kMaxExpertsPerToken).
void switch_heads_forward(Context& ctx, Tensor v, Tensor chosen, const Tensor& logits,
                          const Tensor& projected);

/// dlogits (T, H, E) and dprojected (T, H, E, w) are overwritten, from dv (T, H, D) and the inputs and choice
/// of forward.
void switch_heads_backward(Context& ctx, Tensor dlogits, Tensor dprojected, const Tensor& dv,
                           const Tensor& logits, const Tensor& projected, const Tensor& chosen);

}  // namespace sluice
