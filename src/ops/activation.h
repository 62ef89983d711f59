#pragma once
// SiLU (x sigmoid(x)) and SwiGLU (Shazeer 2020): y = silu(gate) * up.
#include "core/context.h"

namespace sluice {

/// y = silu(x), same shape; y may alias x.
void silu_forward(Context& ctx, Tensor y, const Tensor& x);
/// dx = dy sigma(x) (1 + x (1 - sigma(x))); overwritten, may alias dy.
void silu_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x);

/// y (T, F) = silu(gate) * up with gate_up (T, 2F) = [gate | up] in each row.
void swiglu_forward(Context& ctx, Tensor y, const Tensor& gate_up);
/// dgate_up (T, 2F) overwritten, may alias gate_up.
void swiglu_backward(Context& ctx, Tensor dgate_up, const Tensor& dy, const Tensor& gate_up);

}  // namespace sluice
