#pragma once
// Reductions to one number, result (1) f64 on the context's device. Fixed chunks of 64 Ki elements, summed in order in
// double: on a CPU the result does not depend on the number of threads.
#include "core/context.h"

namespace sluice {

/// result = sum of x^2. A non-finite element makes it non-finite.
void sum_of_squares(Context& ctx, Tensor result, const Tensor& x);
/// result = sum of x, or += with Into::add.
void sum(Context& ctx, Tensor result, const Tensor& x, Into into);
/// result = max |x|, NaN if any element is NaN.
void max_abs(Context& ctx, Tensor result, const Tensor& x);

}  // namespace sluice
