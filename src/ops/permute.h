#pragma once
// Dropless permutation of tokens to experts and back (MegaBlocks, Gale et al. 2022): the T K pairs of a token
// and one of its K experts, called slots t K + k, are sorted by expert into R = T K rows. Tokens are not
// copied: products gather them by index (ops/grouped_linear.h).
#include "core/context.h"

namespace sluice {

/// Expert e has rows [offsets[e], offsets[e + 1]), in the order of their slots. All tensors are i32.
struct Permutation {
  Tensor offsets;  // (E + 1)
  Tensor slots;    // (R): slot of a row
  Tensor tokens;   // (R): its token, slot / K
  Tensor rows;     // (T, K): row of a slot
};

/// Computes the permutation from experts (T, K) i32, each in [0, E), by a stable counting sort.
void permute_plan(Context& ctx, const Permutation& permutation, const Tensor& experts);

/// y (T, C) = or += sum over k of x[rows[t, k]], x (R, C), summed in the order of k in f32 (f64) and rounded
/// once. Its backward pass gathers dy by Permutation::tokens.
void unpermute(Context& ctx, Tensor y, const Tensor& x, const Tensor& rows, Into into);

/// Row i of y (R, C) = row index[i] of x (any, C), index (R) i32. Any dtype, equal for both; an exact copy.
void take_rows(Context& ctx, Tensor y, const Tensor& x, const Tensor& index);
/// Row index[i] of y (any, C) = row i of x (R, C); indices must be distinct.
void put_rows(Context& ctx, Tensor y, const Tensor& x, const Tensor& index);
/// Renumbers rows in [0, end), in place (i32): those in [begin, begin + count) move behind all others, whose
/// order is kept.
void move_rows_last(Context& ctx, Tensor rows, int64_t begin, int64_t count, int64_t end);
/// index (R) i32 = 0, 1, 2, ...
void number_rows(Context& ctx, Tensor index);

}  // namespace sluice
