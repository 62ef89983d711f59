#pragma once
// Adjacent columns of a matrix as a separate matrix.
#include "core/context.h"

namespace sluice {

/// y (T, N): columns [begin, begin + n) += part (T, n), with one rounding. Equal dtypes.
void add_columns(Context& ctx, Tensor y, const Tensor& part, int64_t begin);
/// y (T, N): columns [begin, begin + n) = part (T, n). Equal dtypes.
void put_columns(Context& ctx, Tensor y, const Tensor& part, int64_t begin);
/// part (T, n) = columns [begin, begin + n) of x (T, N).
void take_columns(Context& ctx, Tensor part, const Tensor& x, int64_t begin);

}  // namespace sluice
