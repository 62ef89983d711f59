#pragma once
// Token embedding: y_t = E[token_t].
#include "core/context.h"

namespace sluice {

/// y (T, C) overwritten with rows of weight (V, C); tokens (T) i32. Throws Error(data) for a token outside
/// [0, V).
void embedding_forward(Context& ctx, Tensor y, const Tensor& tokens, const Tensor& weight);

/// dweight (V, C) of accumulate_dtype(dy) += rows of dy (T, C), summed in the order of the tokens for any
/// number of threads.
void embedding_backward(Context& ctx, Tensor dweight, const Tensor& dy, const Tensor& tokens);

}  // namespace sluice
