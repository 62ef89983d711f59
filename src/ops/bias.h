#pragma once
// Biases of linear maps, of one map or of many experts' at once. Bias g of G, each (N), belongs to rows
// [offsets[g], offsets[g + 1]) of y (R, N), and row r takes it times w_r:
//   forward  y_r += w_r b_g      backward  db_g += sum over its rows of w_r dy_r,   dw_r += <dy_r, b_g>
// The factor is that of an expert's output, which weighted_swiglu_forward applies before the last product
// (ops/activation.h): its bias comes behind that product. Sums run over rows, or columns, in a fixed order.
#include "core/context.h"

namespace sluice {

/// What the rows of y are.
struct BiasRows {
  Tensor offsets = {};  // (G + 1) i32; empty: one bias, of all rows. Rows from offsets[G] on are not touched
  Tensor weights = {}, slots = {};  // w_r = weights[slots[r]], with slots (R) i32 and weights of
                                    // accumulate_dtype of the bias, any shape; both empty: 1
};

/// y (R, N) += its biases, rounded once; bias (G, N) or (G N) of y's dtype, or of one of which y has the
/// accumulate_dtype (a router's logits).
void bias_forward(Context& ctx, Tensor y, const Tensor& bias, const BiasRows& rows);

/// dbias (G, N) or (G N) of accumulate_dtype(dy) += its gradient. dy (R, N), or (any, N) with index (R) i32:
/// row r is row index[r] of it. A bias without rows gets nothing.
void bias_backward(Context& ctx, Tensor dbias, const Tensor& dy, const Tensor& index, const BiasRows& rows);

/// dweights (the shape of rows.weights)[slots[r]] += the gradient of w_r; dy and bias as above, of one dtype.
void bias_backward_weights(Context& ctx, Tensor dweights, const Tensor& dy, const Tensor& index,
                           const Tensor& bias, const BiasRows& rows);

}  // namespace sluice
