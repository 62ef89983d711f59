#pragma once
// Residual additions, clipping, copies. The tensors of a call have equal shapes and, unless noted, equal
// dtypes.
#include "core/context.h"

namespace sluice {

/// y = a + b; y may alias either.
void add_forward(Context& ctx, Tensor y, const Tensor& a, const Tensor& b);

/// y = clamp(x, -limit, limit) (Qiu et al. 2025, appendix A.5); y may alias x.
void clip_forward(Context& ctx, Tensor y, const Tensor& x, double limit);
/// dx = dy where |x| < limit, else 0; overwritten, may alias dy.
void clip_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, double limit);

/// y = c tanh(x / c): the soft cap of Gemma 2 (2024); y may alias x. Its backward is cross_entropy's
/// (ops/cross_entropy.h).
void soft_cap_forward(Context& ctx, Tensor y, const Tensor& x, double cap);

/// y = x, converting between f32, bf16 and f64 (round to nearest even).
void cast(Context& ctx, Tensor y, const Tensor& x);
/// y (bf16) = x (f32) with stochastic rounding: each element is rounded to one of its two bf16 neighbours,
/// with probabilities that make the expected value x. Values representable in bf16, infinities and NaN are
/// unchanged; finite values stay finite. The random bits are a function of (key, index), equal on every
/// backend.
void round_stochastically(Context& ctx, Tensor y, const Tensor& x, uint32_t key);
void fill(Context& ctx, Tensor y, double value);
/// y *= factor.
void scale(Context& ctx, Tensor y, double factor);

}  // namespace sluice
