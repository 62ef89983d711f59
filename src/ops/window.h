#pragma once
// First keys of queries (ops/attention.h). Sliding windows: query t sees itself and the window - 1 keys
// before it. Attention skips the keys before first_key, so a window is a later first_key, and costs what its
// keys cost.
#include "core/context.h"

namespace sluice {

/// out (Tq) i32 = max(first_key_t, t + Tk - Tq - window + 1), overwritten; keys = Tk >= Tq, window >= 1.
void window_first_key(Context& ctx, Tensor out, const Tensor& first_key, int64_t keys, int64_t window);

/// z0 (H, Tq) = -inf where window_first_t > first_key_t: attention left there the logit of the first key
/// within the window, and the query does not see the first key of its sequence.
void hide_first_logits(Context& ctx, Tensor z0, const Tensor& first_key, const Tensor& window_first);

/// out (Tq) i32 = first_key_t + own_key_t - t, overwritten: first keys counted among all keys, of queries
/// that are any of them (own_key of ops/attention.h), whose first_key is relative to the query.
void absolute_first_key(Context& ctx, Tensor out, const Tensor& first_key, const Tensor& own_key);

}  // namespace sluice
