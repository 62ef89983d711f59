#pragma once
// Tokens to experts and back, dropless (MegaBlocks, Gale et al. 2022): the T K pairs (token, one of its K
// experts), called slots t K + k, are sorted by expert into R = T K rows. Nothing is copied for it: products
// gather tokens by index (ops/grouped_linear.h).
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

/// y (T, C) = or += sum over k of x[rows[t, k]], x (R, C); added up in the order of k, in f32 (f64), rounded
/// once. Its own backward pass is the gathering of dy by Permutation::tokens.
void unpermute(Context& ctx, Tensor y, const Tensor& x, const Tensor& rows, Into into);

/// Row i of y (R, C) = row index[i] of x (any, C), index (R) i32. Any dtype, the same of both; no bit
/// changes.
void take_rows(Context& ctx, Tensor y, const Tensor& x, const Tensor& index);
/// Row index[i] of y (any, C) = row i of x (R, C); no index stands twice.
void put_rows(Context& ctx, Tensor y, const Tensor& x, const Tensor& index);
/// Of row numbers in [0, end): those in [begin, begin + count) come behind all others, whose order stays.
/// rows i32, in place.
void move_rows_last(Context& ctx, Tensor rows, int64_t begin, int64_t count, int64_t end);
/// index (R) i32 = 0, 1, 2, ...
void number_rows(Context& ctx, Tensor index);

}  // namespace sluice
