#pragma once
// Grouped matrix products, for many experts at once. G weights [N, K] are stored consecutively in
// LinearWeight::value (G N, K), with LinearWeight::groups = G; group g has rows [offsets[g], offsets[g + 1]),
// where offsets is (G + 1) i32. A GPU reads offsets on the device, so all sizes are those of the worst case.
//   forward  y_r = x_r W_g^T      backward  dx_r = dy_r W_g,   dW_g += sum over its rows of dy_r^T x_r
// An operand with an index (R) i32 is gathered: its row r is row index[r], and it may have any number of
// rows. R is the number of rows of the operands that are not gathered. Rows from offsets[G] on are not
// touched. Storage and arithmetic are as in ops/linear.h; sums run over rows in order.
#include "ops/linear.h"

namespace sluice {

/// Like linear_packed_bytes and linear_pack, for all groups together.
LinearPackedBytes grouped_linear_packed_bytes(Context& ctx, DType dtype, int64_t groups, int64_t out_features,
                                              int64_t in_features);
void grouped_linear_pack(Context& ctx, const LinearWeight& w);

/// y (R, N), overwritten; x (R, K), or (any, K) with an index.
void grouped_linear_forward(Context& ctx, Tensor y, const Tensor& x, const LinearWeight& w,
                            const Tensor& offsets, const Tensor& index);

/// dx (R, K), overwritten; dy (R, N), or (any, N) with an index.
void grouped_linear_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LinearWeight& w,
                                   const Tensor& offsets, const Tensor& index);

/// dw (G N, K) of accumulate_dtype(x) += dy^T x per group, or = without reading what dw holds; at most one of
/// dy and x has an index. A group without rows adds nothing, and is zero if dw is overwritten.
void grouped_linear_backward_weight(Context& ctx, Tensor dw, const Tensor& dy, const Tensor& x,
                                    const Tensor& offsets, const Tensor& dy_index, const Tensor& x_index,
                                    Into into = Into::add);

}  // namespace sluice
