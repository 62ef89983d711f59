#pragma once
// Reductions, most of them to one number, a result (1) f64 on the context's device. Fixed chunks of 64 Ki
// elements are summed in order in double, so that on a CPU the result does not depend on the number of
// threads.
#include "core/context.h"

namespace sluice {

/// result = sum of x^2. A non-finite element makes it non-finite.
void sum_of_squares(Context& ctx, Tensor result, const Tensor& x);
/// An order-independent sum of squares: the squares of 32 consecutive elements are added in double, and the
/// result is split into bins, where bin k holds a multiple of 2^(40 - 23 k). Adding bins is exact for up to
/// 2^30 such numbers, in any order. Parts below 2^-122 are lost; from 2^63 on the result is infinite (after
/// Demmel and Nguyen, "Parallel reproducible summation", IEEE Trans. Computers 2015).
constexpr int64_t kSquareBins = 8, kSquareBlock = 32;
/// bins (kSquareBins) f64 += the squares of x, in blocks of 32 from its start.
void add_squares(Context& ctx, Tensor bins, const Tensor& x);
/// The sum that bins in host memory represent.
double squares_of_bins(const double* bins);

/// result = sum of x, or += with Into::add.
void sum(Context& ctx, Tensor result, const Tensor& x, Into into);
/// y (n) = the sum of rows (R, n), by the tree of core/tree_sum.h; += with Into::add. rows is overwritten; y
/// must not be one of them. The bits are equal on every backend.
void sum_rows(Context& ctx, Tensor y, const Tensor& rows, Into into);
/// result = max |x|; NaN if any element is NaN.
void max_abs(Context& ctx, Tensor result, const Tensor& x);

}  // namespace sluice
