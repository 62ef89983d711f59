#pragma once
// Value zeroing (the sink-aware paper, arXiv 2602.01203, appendix A): removes the contribution of the first
// token's value from the output, O_t^h -= A_t,first^h v_first^{g(h)}. Attention with values that are zeroed
// beforehand gives the same without cancellation. Because heads share values, each head selects its output
// from two attentions, with and without zeroing.
#include "core/context.h"

namespace sluice {

/// out (T, Hkv, D) = v, but 0 for the first token of each sequence (first_key_t = t, first_key (T) i32); may
/// alias v.
void zero_first_values(Context& ctx, Tensor out, const Tensor& v, const Tensor& first_key);

/// o = other for the heads and sequences in which the mean attention on the first key exceeds `threshold`.
/// The mean is over the sequence's tokens, its first included, of exp(z0 - lse), times sigmoid(lse - sink_h)
/// if there is a sink (equation 9); tokens with target kPadding (core/targets.h) are left out. o, other (T,
/// H, D); lse, z0 (H, T) of accumulate_dtype; sink (H), or (H, T) of accumulate_dtype, a sink's logits by
/// query, or empty. first_key, targets (T) i32; a sequence is the tokens from first_key on that share it.
void take_sink_heads(Context& ctx, Tensor o, const Tensor& other, const Tensor& lse, const Tensor& z0,
                     const Tensor& sink, const Tensor& first_key, const Tensor& targets, double threshold);

}  // namespace sluice
