#pragma once
// Value zeroing (the sink-aware paper, arXiv 2602.01203, appendix A): what a model does without the
// values of its first tokens, which attention then spends itself on for nothing: O_t^h -= A_t,first^h
// v_first^{g(h)}. Attention of values that were zeroed beforehand is the same without cancellation; heads
// share values, so each takes its output from one of two attentions.
#include "core/context.h"

namespace sluice {

/// out (T, Hkv, D) = v, but 0 where a token is the first of its sequence (first_key_t = t, first_key (T)
/// i32); may be v.
void zero_first_values(Context& ctx, Tensor out, const Tensor& v, const Tensor& first_key);

/// For heads whose mean over all T tokens, first ones included, of attention on the first key, exp(z0 - lse),
/// times sigmoid(lse - sink_h) where there is a sink (equation 9), is above `threshold`: o = other. o, other
/// (T, H, D); lse, z0 (H, T) of accumulate_dtype; sink (H), or empty.
void take_sink_heads(Context& ctx, Tensor o, const Tensor& other, const Tensor& lse, const Tensor& z0,
                     const Tensor& sink, double threshold);

}  // namespace sluice
