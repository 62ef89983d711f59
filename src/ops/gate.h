#pragma once
// Gates (Gated Attention, Qiu et al. 2025, eq. 5 and table 1): y = x * s (multiply) or x + s (add),
// s = a(z) with scores per channel (elementwise) or per head (headwise), specific to a head or averaged over
// heads.
//   multiply: dx = dy s, ds = dy x;   add: dx = dy, ds = dy;   dz = a'(z) ds (headwise: ds summed over
//   channels) shared after activation:  s_c = (1/H) sum_h a(z_hc);      shared before: s_c = a((1/H) sum_h
//   z_hc)
// The op knows no positions: x is a query, key, value, attention output (T, H, D) or the layer's output (T,
// 1, C).
#include "core/context.h"
#include "core/kinds.h"

namespace sluice {

struct GateKind {
  GateActivation activation = GateActivation::sigmoid;
  GateSharing sharing = GateSharing::specific;
  GateCombine combine = GateCombine::multiply;
};

/// y, x (T, H, D); z is (Z, H, D) elementwise or (Z, H) headwise with Z = T, or Z = 1 for scores that do not
/// depend on the input. y overwritten, may alias x. Scores are computed in f32 (f64) whatever the storage.
/// With headwise scores and sharing, the average is one score per token.
void gate_forward(Context& ctx, Tensor y, const Tensor& x, const Tensor& z, const GateKind& kind);

/// dx (T, H, D) overwritten, may alias dy. dz has the shape of z: for Z = T it is overwritten and has z's
/// dtype; for Z = 1 it is the gradient of a parameter: accumulate_dtype, added to. With T = 1 the two cannot
/// be told apart but by dtype: f32 and f64 are refused. dhead (H) f64, or empty: a further gradient of every
/// token's mean score over channels of a head; added to ds before it is rounded (dz += a'(z) dhead_h /
/// channels of z). Only for scores specific to a head.
void gate_backward(Context& ctx, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x, const Tensor& z,
                   const GateKind& kind, const Tensor& dhead = {});

/// scores, for analysis: s in the shape of z ((T, H, D), (T, H), or Z = 1), accumulate_dtype(z), after
/// activation and sharing (shared scores are repeated over heads).
void gate_scores(Context& ctx, Tensor scores, const Tensor& z, const GateKind& kind);

}  // namespace sluice
