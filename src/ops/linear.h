#pragma once
// Dense matrix products. A weight is [out, in] row-major (Hugging Face), y = x W^T.
//   forward   y  = x W^T              backward  dx = dy W,   dW += dy^T x
// N = out features, K = in features, T = rows (tokens). Storage f32, bf16 (f32 accumulation) or f64.
#include <vector>

#include "core/context.h"

namespace sluice {

struct LinearWeight;

/// A low-rank adapter of a frozen weight (ops/low_rank.h): scale b a is added to its rows [begin, begin + n).
struct LowRank {
  const LinearWeight *a, *b;  // (r, K), (n, r)
  double scale;
  int64_t begin;
};

/// A weight and, if the backend benefits, its packed copies. Packed tensors are empty until the owner
/// allocates them with linear_packed_bytes and fills them with linear_pack; they become stale when `value`
/// changes.
struct LinearWeight {
  Tensor value;                        // (N, K)
  Tensor packed;                       // u8 (bytes): for linear_forward
  Tensor packed_transposed;            // u8 (bytes): for linear_backward_input
  bool joined_in_backward = false;     // whether backward takes packed_transposed of a joined weight instead
  int64_t groups = 1;                  // number of consecutive weights, for ops/grouped_linear.h
  std::vector<LowRank> low_rank = {};  // adapters, applied only by linear_forward and linear_backward_input
};

/// Sizes in bytes of the packed copies of an (N, K) weight for products with about `rows` rows; 0 if the
/// backend does not use one.
struct LinearPackedBytes {
  int64_t forward = 0, transposed = 0;
};
LinearPackedBytes linear_packed_bytes(Context& ctx, DType dtype, int64_t out_features, int64_t in_features,
                                      int64_t rows);

/// Updates the allocated packed copies from w.value. Called once per optimizer step.
void linear_pack(Context& ctx, const LinearWeight& w);

/// y (T, N) = x (T, K) W^T. y is overwritten.
void linear_forward(Context& ctx, Tensor y, const Tensor& x, const LinearWeight& w);

/// dx (T, K) = dy (T, N) W, overwritten or added to.
void linear_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LinearWeight& w, Into into);

/// dw (N, K) += dy^T x, or = without reading what dw holds, with dy (T, N), x (T, K). dw has
/// accumulate_dtype(x.dtype): f32 for bf16.
void linear_backward_weight(Context& ctx, Tensor dw, const Tensor& dy, const Tensor& x,
                            Into into = Into::add);

}  // namespace sluice
