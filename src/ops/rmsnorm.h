#pragma once
// RMSNorm (Zhang & Sennrich 2019, eq. 4): y = w * x * r,  r = 1 / sqrt(mean(x^2) + eps), over the
// last axis.
//   backward, g = dy * w:  dx = r (g - x r^2 mean(g x)),   dw += sum_rows dy x r
// Rows are (R, D), flattened from any shape. The weight is (G, D) or (D), and row i uses weight row i mod G:
// G = 1 for a layer norm or a norm shared by heads; G = heads for a weight per head, with rows ordered
// (token, head). An empty weight means ones; dweight is then empty, too.
#include "core/context.h"

namespace sluice {

/// y (..., D) overwritten, may alias x; rstd (R) of accumulate_dtype(x). eps is added to the mean square.
void rmsnorm_forward(Context& ctx, Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight, double eps);

/// The norm of a sum: sum = a + b (R, D), overwritten and rounded to its dtype; y = norm(sum). One pass over
/// memory if the backend supports it; sum may alias a or b.
void add_rmsnorm_forward(Context& ctx, Tensor sum, Tensor y, Tensor rstd, const Tensor& a, const Tensor& b,
                         const Tensor& weight, double eps);

/// dx overwritten or added to (may alias dy); dweight += (accumulate_dtype). x is the input of forward.
void rmsnorm_backward(Context& ctx, Tensor dx, Tensor dweight, const Tensor& dy, const Tensor& x,
                      const Tensor& weight, const Tensor& rstd, Into into);

}  // namespace sluice
