#pragma once
// Exclusive self attention (Zhai 2026, arXiv 2603.09078): every head's output without its component along the
// token's own value,
//   z_th = y_th - s_h c_th v_tg,   c_th = (y_th . v_tg) / (v_tg . v_tg),   g the key/value head of h
// with s_h = 1 (the paper), when z_th is orthogonal to v_tg, or a learned s_h. c is 0 where v . v is below
// the smallest normal number of the arithmetic (f32, or f64): such a value has no direction. Backward, with a
// = dz . v and q = v . v:
//   dy = dz - s (a / q) v,   ds_h = -sum over t of c a,
//   dv = -sum over the heads of g of s (c dz + (a / q) (y - 2 c v))
#include "core/context.h"

namespace sluice {

/// z, y (T, H, D), v (T, Hkv, D), Hkv divides H; s (H), or empty for 1. z is overwritten and may alias y.
void exclusive_forward(Context& ctx, Tensor z, const Tensor& y, const Tensor& v, const Tensor& s);

/// dy (T, H, D) is overwritten and may alias dz. dv (T, Hkv, D) is overwritten; it is the gradient through
/// this op alone. ds (H) of accumulate_dtype is accumulated, tokens in the order of core/tree_sum.h; empty
/// without s.
void exclusive_backward(Context& ctx, Tensor dy, Tensor dv, Tensor ds, const Tensor& dz, const Tensor& y,
                        const Tensor& v, const Tensor& s);

/// The part of a backend: as exclusive_backward, with each token's gradient of s, (T, H) of accumulate_dtype,
/// overwritten, in place of their sum; empty without s.
void exclusive_backward_rows(Context& ctx, Tensor dy, Tensor dv, Tensor ds_rows, const Tensor& dz,
                             const Tensor& y, const Tensor& v, const Tensor& s);

}  // namespace sluice
