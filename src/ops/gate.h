#pragma once
// Gates (Gated Attention, Qiu et al. 2025, eq. 5 and table 1): y = x * s (multiply) or x + s (add), where
// s = a(z) has one score per channel (elementwise) or per head (headwise), specific to a head or averaged
// over heads:
//   shared after the activation:  s_c = (1/H) sum_h a(z_hc)
//   shared before the activation: s_c = a((1/H) sum_h z_hc)
// Backward: multiply: dx = dy s, ds = dy x;  add: dx = dy, ds = dy;  dz = a'(z) ds (headwise: ds is summed
// over channels). The op does not depend on the gate's position: x is a query, key, value or attention output
// (T, H, D), or the output of the layer (T, 1, C).
#include "core/context.h"
#include "core/score_range.h"

namespace sluice {

struct GateKind {
  GateActivation activation = GateActivation::sigmoid;
  GateSharing sharing = GateSharing::specific;
  GateCombine combine = GateCombine::multiply;
};

/// Whether such scores at attention's output measure the importance of each head: separate for each head, in
/// [0, 1], multiplied.
inline bool measures_importance(const GateKind& kind) {
  return kind.sharing == GateSharing::specific && kind.combine == GateCombine::multiply &&
         score_range(kind.activation).has_value();
}

/// y, x (T, H, D); z is (Z, H, D) elementwise or (Z, H) headwise with Z = T, or Z = 1 for scores that do not
/// depend on the input. y is overwritten and may alias x. Scores are computed in f32 (f64) for any storage
/// type. Shared headwise scores average to one score per token.
void gate_forward(Context& ctx, Tensor y, const Tensor& x, const Tensor& z, const GateKind& kind);

/// dx (T, H, D) is overwritten and may alias dy. dz has the shape of z: for Z = T it is overwritten, has
/// z's dtype and may be columns of a matrix; for Z = 1 it is a parameter gradient of accumulate_dtype and is
/// accumulated. With T = 1 the two differ only in dtype, so f32 and f64 are refused. dhead (H) f64, or empty:
/// an additional gradient of every token's mean score over the channels of a head, added to ds before
/// rounding (dz += a'(z) dhead_h / channels of z). Only for scores specific to a head.
void gate_backward(Context& ctx, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x, const Tensor& z,
                   const GateKind& kind, const Tensor& dhead = {});

/// scores, for analysis: s in the shape of z ((T, H, D), (T, H), or Z = 1), accumulate_dtype(z), after
/// activation and sharing (shared scores are repeated over heads).
void gate_scores(Context& ctx, Tensor scores, const Tensor& z, const GateKind& kind);

}  // namespace sluice
