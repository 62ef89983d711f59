#pragma once
// Padding of samples (target kPadding, core/targets.h). Attention hides it from the tokens before it, so that
// no gradient reaches it from the loss; what the gradients of auxiliary losses give all rows alike is taken
// from its rows here.
#include "core/context.h"

namespace sluice {

/// Rows t of x (T, ...), which may be columns of a matrix, become 0 where targets (T) i32 has kPadding.
void clear_padding(Context& ctx, Tensor x, const Tensor& targets);

}  // namespace sluice
