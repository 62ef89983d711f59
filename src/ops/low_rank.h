#pragma once
// Low-rank adapters (LoRA, Hu et al. 2021, equation 3): a weight W that is fixed, plus s B A with A (r, K)
// and B (n, r), is
//   y = x W^T + s (x A^T) B^T
//   dx += s (dy B) A,   dA += s (dy B)^T x,   dB += s dy^T (x A^T)
// all of products with T x r matrices: neither B A nor the gradient of W exists. ops/linear.h adds them to
// its own products; what is here is one adapter's part.
#include "ops/linear.h"

namespace sluice {

/// y (T, N): the adapter's columns += s (x A^T) B^T, x (T, K).
void low_rank_forward(Context& ctx, Tensor y, const Tensor& x, const LowRank& adapter);
/// dx (T, K) += s (dy B) A, of the adapter's columns of dy (T, N).
void low_rank_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LowRank& adapter);
/// da (r, K) and db (n, r), of accumulate_dtype(x), are added to. x A^T is computed again.
void low_rank_backward_weight(Context& ctx, Tensor da, Tensor db, const Tensor& dy, const Tensor& x,
                              const LowRank& adapter);

}  // namespace sluice
