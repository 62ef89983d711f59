#pragma once
// Attention over selected keys on tensor cores (forward.cu, backward.cu).
#include "attention/visible_keys.cuh"
#include "ops/sparse_attention.h"

namespace sluice::cuda {

/// Whether the kernels of tensor cores support these tensors: bf16, head_dim 64 or 128, 16-byte alignment and
/// a group of 1, 2, 4, ... 32 query heads.
bool sparse_tensor_cores(const AttentionInputs& in);

/// As sparse_attention_forward. visible: of `in`.
void sparse_union_forward(Context& ctx, const AttentionState& out, const AttentionInputs& in,
                          const VisibleKeys& visible, const Selection& keys);

/// As sparse_attention_backward, with delta (H, T) f32 = <dO_t, O_t> - dlse_t. Deterministic.
void sparse_union_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o, const Tensor& delta,
                           const AttentionInputs& in, const VisibleKeys& visible, const Tensor& lse,
                           const Tensor& coef0, const Selection& keys);

}  // namespace sluice::cuda
