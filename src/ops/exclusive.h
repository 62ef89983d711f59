#pragma once
// Exclusive self attention (Zhai 2026, arXiv 2603.09078): every head's output without its component along the
// token's own value,
//   z_th = y_th - s_h c_th v_tg,   c_th = (y_th . v_tg) / (v_tg . v_tg),   g the key/value head of h
// with s_h = 1 (the paper), when z_th is orthogonal to v_tg, or a learned s_h. c is 0 where v . v is below
// the smallest normal number of the arithmetic (f32, or f64): such a value has no direction. Backward, with a
// = dz . v and q = v . v:
//   dy = dz - s (a / q) v,   ds_h = -sum over t of c a,
//   dv = -sum over the heads of g of s (c dz + (a / q) (y - 2 c v))
// A token that sees only itself has a y parallel to v: y - c v is 0, and what is computed of it is the
// rounding of y. A norm behind it would enlarge that, and its gradients through y and through v, whose sum is
// 0, by up to 1 / sqrt(eps). So where |y - c v| < exclusive_rounding |y|, y itself counts as c v:
//   z = (1 - s) y,   dy = (1 - s) dz,   ds as above,   and nothing is added to dv
// with the same sum of dv and of c dy, which is what a value seen by no other token gets.
#include "core/context.h"

namespace sluice {

/// How far a y that is parallel to v lies from c v by rounding, relative to |y|: that of the arithmetic (32
/// roundings are more than those of its products), and, where a norm follows, one rounding to the storage
/// type, which a multiple of v (a sink's factor) has in bf16. Without a norm that one does no harm; the
/// gradients of a y in bf16 that is nearly parallel, as of a token that sees little but itself, are kept.
constexpr double exclusive_rounding(DType storage, bool normed) {
  const double unit = storage == DType::f64 ? 0x1p-53 : storage == DType::f32 ? 0x1p-24 : 0x1p-8;
  const double arithmetic = storage == DType::f64 ? 0x1p-53 : 0x1p-24;
  return 32 * arithmetic + (normed ? unit : 0);
}

/// z, y (T, H, D), v (T, Hkv, D), Hkv divides H; s (H), or empty for 1. z is overwritten and may alias y.
/// normed: a norm follows (exclusive_rounding).
void exclusive_forward(Context& ctx, Tensor z, const Tensor& y, const Tensor& v, const Tensor& s,
                       bool normed = false);

/// dy (T, H, D) is overwritten and may alias dz. dv (T, Hkv, D) is overwritten; it is the gradient through
/// this op alone. ds (H) of accumulate_dtype is accumulated, tokens in the order of core/tree_sum.h; empty
/// without s.
void exclusive_backward(Context& ctx, Tensor dy, Tensor dv, Tensor ds, const Tensor& dz, const Tensor& y,
                        const Tensor& v, const Tensor& s, bool normed = false);

/// The part of a backend: as exclusive_backward, with each token's gradient of s, (T, H) of accumulate_dtype,
/// overwritten, in place of their sum; empty without s.
void exclusive_backward_rows(Context& ctx, Tensor dy, Tensor dv, Tensor ds_rows, const Tensor& dz,
                             const Tensor& y, const Tensor& v, const Tensor& s, bool normed);

}  // namespace sluice
