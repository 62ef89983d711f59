#pragma once
// Attention with f32 arithmetic (attention_f32.cu): f32 storage, and bf16 where the tensor-core kernels do
// not go. Any head_dim up to 256, any alignment, any scale. No scratch.
#include "core/context.h"

namespace sluice::cuda {

/// As attention_forward in ops/attention.h.
void attention_f32_forward(Context& ctx, const Tensor& o, const Tensor& lse, const Tensor& z0,
                           const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& first_key,
                           float scale);

/// As attention_backward, with delta (H, T) f32 = <dO_t, O_t> - dlse_t. Deterministic.
void attention_f32_backward(Context& ctx, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                            const Tensor& d_o, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& lse, const float* delta, const Tensor& first_key, float scale,
                            const Tensor& coef0);

}  // namespace sluice::cuda
