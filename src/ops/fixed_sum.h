#pragma once
// Order-independent sums of 64-bit fixed-point numbers with a last bit of 2^-50 (comm/README.md). A tensor of
// n such numbers is (n, 2) i32, each pair holding the bytes of an int64. Sums below kFixedLimit do not
// overflow. The bits are equal on every backend.
#include <limits>

#include "core/context.h"

namespace sluice {

constexpr double kFixedOne = 1125899906842624.0;  // 2^50
constexpr double kFixedLimit = 4096.0;
/// Value of `bad` if no element was out of range.
constexpr int64_t kNoneBad = std::numeric_limits<int64_t>::max();

/// sums (n, 2) += x (n) f32 or f64, each element rounded to the nearest 2^-50, ties to even; = with
/// Into::overwrite. An element that is not finite, or whose magnitude is not below `limit`, counts as 0 and
/// sets bad (1, 2) = min(bad, first + its index).
void add_fixed(Context& ctx, Tensor sums, Tensor bad, const Tensor& x, double limit, int64_t first,
               Into into);
/// sum (n, 2) = the sum over R of rows (R, n, 2). sum must not be one of the rows.
void sum_fixed_rows(Context& ctx, Tensor sum, const Tensor& rows);
/// x (n) = sums (n, 2), rounded to nearest.
void from_fixed(Context& ctx, Tensor x, const Tensor& sums);

}  // namespace sluice
