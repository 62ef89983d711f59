#pragma once
// Low-rank adapters (LoRA, Hu et al. 2021, equation 3): with a frozen weight W plus s B A, A (r, K) and B (n,
// r),
//   y = x W^T + s (x A^T) B^T
//   dx += s (dy B) A,   dA += s (dy B)^T x,   dB += s dy^T (x A^T)
// All products use T x r matrices; neither B A nor the gradient of W is formed. ops/linear.h adds these parts
// to its own products; each function here computes the part of one adapter.
#include "ops/linear.h"

namespace sluice {

/// y (T, N): the adapter's columns += s (x A^T) B^T, x (T, K).
void low_rank_forward(Context& ctx, Tensor y, const Tensor& x, const LowRank& adapter);
/// dx (T, K) += s (dy B) A, with the adapter's columns of dy (T, N).
void low_rank_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LowRank& adapter);
/// da (r, K) and db (n, r), of accumulate_dtype(x), are accumulated. x A^T is recomputed.
void low_rank_backward_weight(Context& ctx, Tensor da, Tensor db, const Tensor& dy, const Tensor& x,
                              const LowRank& adapter);

}  // namespace sluice
