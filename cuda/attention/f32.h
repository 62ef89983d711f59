#pragma once
// Attention with f32 arithmetic (f32.cu): f32 storage, and bf16 shapes that the tensor-core kernels do not
// support. Any head_dim up to 256, any alignment, any scale. No scratch memory.
#include "attention/visible_keys.cuh"
#include "ops/sparse_attention.h"

namespace sluice::cuda {

/// As attention_forward in ops/attention.h; with a selection, as sparse_attention_forward. visible: of `in`.
void attention_f32_forward(Context& ctx, const AttentionState& out, const AttentionInputs& in,
                           const VisibleKeys& visible, const Selection* selection = nullptr);

/// As attention_backward or, with a selection, sparse_attention_backward, with
/// delta (H, T) f32 = <dO_t, O_t> - dlse_t. Deterministic.
void attention_f32_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o, const Tensor& delta,
                            const AttentionInputs& in, const VisibleKeys& visible, const Tensor& lse,
                            const Tensor& coef0, const Selection* selection = nullptr);

}  // namespace sluice::cuda
