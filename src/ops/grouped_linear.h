#pragma once
// Dense products of many experts at once. G weights [N, K] lie behind each other in LinearWeight::value (G N,
// K), with LinearWeight::groups = G; offsets (G + 1) i32 say which rows belong to which: group g has rows
// [offsets[g], offsets[g + 1]). A GPU reads them on the device, so every size here is that of the worst case.
//   forward  y_r = x_r W_g^T      backward  dx_r = dy_r W_g,   dW_g += sum over its rows of dy_r^T x_r
// An operand with an index (R) i32 is gathered: row r is row index[r] of it, which then may have any number
// of rows. R is the number of rows of whatever is not gathered. Rows from offsets[G] on are left alone.
// Storage and arithmetic as in ops/linear.h; sums run over rows in their order.
#include "ops/linear.h"

namespace sluice {

/// As linear_packed_bytes and linear_pack, for all groups together.
LinearPackedBytes grouped_linear_packed_bytes(Context& ctx, DType dtype, int64_t groups, int64_t out_features,
                                              int64_t in_features);
void grouped_linear_pack(Context& ctx, const LinearWeight& w);

/// y (R, N), overwritten; x (R, K), or (any, K) with an index.
void grouped_linear_forward(Context& ctx, Tensor y, const Tensor& x, const LinearWeight& w,
                            const Tensor& offsets, const Tensor& index);

/// dx (R, K), overwritten; dy (R, N), or (any, N) with an index.
void grouped_linear_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LinearWeight& w,
                                   const Tensor& offsets, const Tensor& index);

/// dw (G N, K) of accumulate_dtype(x) += ...; at most one of dy and x has an index. A group without rows adds
/// nothing.
void grouped_linear_backward_weight(Context& ctx, Tensor dw, const Tensor& dy, const Tensor& x,
                                    const Tensor& offsets, const Tensor& dy_index, const Tensor& x_index);

}  // namespace sluice
