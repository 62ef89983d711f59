#pragma once
// RMSNorm of every head followed by the rotary embedding, for queries and keys (QK-norm), in one pass over
// memory. The formulas are those of ops/rmsnorm.h and ops/rope.h.
#include "core/context.h"

namespace sluice {

/// y (T, H, D) = rope(rmsnorm(x)), overwritten, may not alias x; rstd (T H) of accumulate_dtype(x).
/// weight (D) or (H, D), or empty for ones, with dweight empty; positions (T) i32; cos, sin (positions, D/2)
/// of accumulate_dtype(x).
void norm_rope_forward(Context& ctx, Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight, double eps,
                       const Tensor& positions, const Tensor& cos, const Tensor& sin);

/// dx (T, H, D) overwritten, may alias dy, or be columns of a matrix; dweight += (accumulate_dtype). x is the
/// input of forward.
void norm_rope_backward(Context& ctx, Tensor dx, Tensor dweight, const Tensor& dy, const Tensor& x,
                        const Tensor& weight, const Tensor& rstd, const Tensor& positions, const Tensor& cos,
                        const Tensor& sin);

/// How queries or keys were made, for an op that computes their gradient and goes on to that of what they
/// were made from: the arguments of norm_rope_backward, or, with an empty rstd, of rope_backward, which has
/// no x.
struct PositionBackward {
  Tensor dx;  // (T, H, D), overwritten; may alias the gradient of the queries or keys, or be columns of a
              // matrix
  Tensor dweight = {}, x = {}, weight = {}, rstd = {};
  Tensor positions, cos, sin;
};

/// norm_rope_backward or rope_backward with these arguments.
void position_backward(Context& ctx, const PositionBackward& p, const Tensor& dy);

}  // namespace sluice
