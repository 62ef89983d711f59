#pragma once
// SiLU (x sigmoid(x)), SwiGLU (Shazeer 2020): y = silu(gate) * up, and the squared ReLU (So et al. 2021,
// Primer): max(x, 0)^2.
#include <optional>

#include "core/context.h"

namespace sluice {

/// y = silu(x), same shape; y may alias x.
void silu_forward(Context& ctx, Tensor y, const Tensor& x);
/// dx = dy sigma(x) (1 + x (1 - sigma(x))); overwritten, may alias dy.
void silu_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x);

/// y = max(x, 0)^2, same shape; y may alias x.
void squared_relu_forward(Context& ctx, Tensor y, const Tensor& x);
/// dx = dy 2 max(x, 0); overwritten, may alias dy.
void squared_relu_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x);

/// y (T, F) = silu(gate) * up with gate_up (T, 2F) = [gate | up] in each row.
void swiglu_forward(Context& ctx, Tensor y, const Tensor& gate_up);
/// dgate_up (T, 2F) overwritten, may alias gate_up.
void swiglu_backward(Context& ctx, Tensor dgate_up, const Tensor& dy, const Tensor& gate_up);

/// SwiGLU with one weight per row: y_r = weights[slots[r]] silu(gate_r) up_r. y (R, F), gate_up (R, 2F),
/// slots (R) i32, weights of accumulate_dtype(y), any shape. This applies the weight of an expert's output
/// before the down projection: the result is the same, and the gradient of the weight needs no saved tensor
/// of the output's width.
/// With a limit c, gpt-oss's clamped form (OpenAI 2025, model.py of the repository gpt-oss) in place of
/// silu(gate) up: g sigmoid(1.702 g) (u + 1) with g = min(gate, c), u = min(max(up, -c), c). NaN passes
/// through.
void weighted_swiglu_forward(Context& ctx, Tensor y, const Tensor& gate_up, const Tensor& weights,
                             const Tensor& slots, std::optional<double> limit);
/// dgate_up (R, 2F) overwritten, may alias gate_up; dweights (shape of weights)[slots[r]] = sum over f of dy
/// silu(gate) up, or the clamped form. What is beyond the limit has the gradient 0.
void weighted_swiglu_backward(Context& ctx, Tensor dgate_up, Tensor dweights, const Tensor& dy,
                              const Tensor& gate_up, const Tensor& weights, const Tensor& slots,
                              std::optional<double> limit);

}  // namespace sluice
