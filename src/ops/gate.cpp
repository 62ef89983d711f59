#include "ops/gate.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(gate_forward)
SLUICE_DECLARE_BACKENDS(gate_backward)
SLUICE_DECLARE_BACKENDS(gate_scores)

namespace sluice {
namespace {

/// x (T, H, D) and z (Z, H, D) or (Z, H) with Z = T or 1, of one dtype.
void check_gate(const char* op, const Tensor& x, const Tensor& z) {
  check_floating(op, "x", x);
  SLUICE_CHECK(x.rank == 3, "{}: x must be (T, H, D), got {}", op, x.describe());
  const bool tokens = (z.rank == 2 || z.rank == 3) && (z.dim(0) == x.dim(0) || z.dim(0) == 1);
  SLUICE_CHECK(z.dtype == x.dtype && tokens && z.dim(1) == x.dim(1) && (z.rank == 2 || z.dim(2) == x.dim(2)),
               "{}: z must be (Z, {}, {}) or (Z, {}) {} with Z = {} or 1, got {}", op, x.dim(1), x.dim(2),
               x.dim(1), dtype_name(x.dtype), x.dim(0), z.describe());
}

}  // namespace

void gate_forward(Context& ctx, Tensor y, const Tensor& x, const Tensor& z, const GateKind& kind) {
  check_gate("gate_forward", x, z);
  check_like("gate_forward", "y", y, x);
  SLUICE_DISPATCH(gate_forward, ctx, y, x, z, kind);
}

void gate_backward(Context& ctx, Tensor dx, Tensor dz, const Tensor& dy, const Tensor& x, const Tensor& z,
                   const GateKind& kind, const Tensor& dhead) {
  check_gate("gate_backward", x, z);
  if (dhead) {
    check_tensor("gate_backward", "dhead", dhead, DType::f64, {x.dim(1)});
    SLUICE_CHECK(kind.sharing == GateSharing::specific,
                 "gate_backward: dhead is for scores specific to a head");
  }
  check_like("gate_backward", "dx", dx, x);
  check_like("gate_backward", "dy", dy, x);
  const bool per_token = z.dim(0) == x.dim(0) && (x.dim(0) > 1 || dz.dtype != accumulate_dtype(z.dtype));
  const DType expected = per_token ? z.dtype : accumulate_dtype(z.dtype);
  SLUICE_CHECK(dz.dtype == expected && dz.rank == z.rank && dz.shape == z.shape,
               "gate_backward: dz must have the shape of z, {}, and be {}, got {}", z.describe(),
               dtype_name(expected), dz.describe());
  SLUICE_CHECK(per_token || dz.contiguous(), "gate_backward: dz of a parameter must be contiguous, got {}",
               dz.describe());
  SLUICE_CHECK(
      per_token || x.dim(0) > 1,
      "gate_backward: with one token, z {} may be an activation or a parameter; run at least two tokens",
      z.describe());
  SLUICE_DISPATCH(gate_backward, ctx, dx, dz, dy, x, z, kind, dhead);
}

void gate_scores(Context& ctx, Tensor scores, const Tensor& z, const GateKind& kind) {
  check_floating("gate_scores", "z", z);
  SLUICE_CHECK(z.rank == 2 || z.rank == 3, "gate_scores: z must be (Z, H, D) or (Z, H), got {}",
               z.describe());
  SLUICE_CHECK(scores.dtype == accumulate_dtype(z.dtype) && scores.rank == z.rank && scores.shape == z.shape,
               "gate_scores: scores must have the shape of z, {}, and be {}, got {}", z.describe(),
               dtype_name(accumulate_dtype(z.dtype)), scores.describe());
  SLUICE_DISPATCH(gate_scores, ctx, scores, z, kind);
}

}  // namespace sluice
