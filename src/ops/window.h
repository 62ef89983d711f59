#pragma once
// Sliding windows: query t sees itself and the window - 1 keys before it. Attention skips the keys before
// first_key (ops/attention.h), so a window is a later first_key, and costs what its keys cost.
#include "core/context.h"

namespace sluice {

/// out (Tq) i32 = max(first_key_t, t + Tk - Tq - window + 1), overwritten; keys = Tk >= Tq, window >= 1.
void window_first_key(Context& ctx, Tensor out, const Tensor& first_key, int64_t keys, int64_t window);

/// z0 (H, Tq) = -inf where window_first_t > first_key_t: attention left there the logit of the first key
/// within the window, and the query does not see the first key of its sequence.
void hide_first_logits(Context& ctx, Tensor z0, const Tensor& first_key, const Tensor& window_first);

}  // namespace sluice
