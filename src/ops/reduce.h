#pragma once
// Reductions to a host scalar. Fixed chunks of 64 Ki elements, summed in order in double: the result does not depend on
// the number of threads.
#include "core/context.h"

namespace sluice {

/// *result = sum of x^2. A non-finite element makes it non-finite.
void sum_of_squares(Context& ctx, double* result, const Tensor& x);
/// *result = sum of x.
void sum(Context& ctx, double* result, const Tensor& x);
/// *result = max |x|, NaN if any element is NaN.
void max_abs(Context& ctx, double* result, const Tensor& x);

}  // namespace sluice
