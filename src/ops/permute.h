#pragma once
// Tokens to experts and back, dropless (MegaBlocks, Gale et al. 2022): the T K pairs (token, one of its K experts), called
// slots t K + k, are sorted by expert into R = T K rows. Nothing is copied for it: products gather tokens by index
// (ops/grouped_linear.h).
#include "core/context.h"

namespace sluice {

/// Expert e has rows [offsets[e], offsets[e + 1]), in the order of their slots: i32 all.
struct Permutation {
  Tensor offsets;  // (E + 1)
  Tensor slots;    // (R): slot of a row
  Tensor tokens;   // (R): its token, slot / K
  Tensor rows;     // (T, K): row of a slot
};

/// Overwrites all of it from experts (T, K) i32, each in [0, E), by a stable counting sort.
void permute_plan(Context& ctx, const Permutation& permutation, const Tensor& experts);

/// y (T, C) = or += sum over k of x[rows[t, k]], x (R, C); added up in the order of k, in f32 (f64), rounded once. Its own
/// backward pass is the gathering of dy by Permutation::tokens.
void unpermute(Context& ctx, Tensor y, const Tensor& x, const Tensor& rows, Into into);

}  // namespace sluice
