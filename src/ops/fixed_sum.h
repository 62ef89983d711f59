#pragma once
// Sums that have no order: of 64-bit fixed-point numbers, whose last bit is 2^-50 (comm/README.md). A tensor
// of n of them is (n, 2) i32, each pair the bytes of an int64. What adds up to less than kFixedLimit does not
// overflow. The same bits on every backend.
#include <limits>

#include "core/context.h"

namespace sluice {

constexpr double kFixedOne = 1125899906842624.0;  // 2^50
constexpr double kFixedLimit = 4096.0;
/// In `bad`: no element was left out.
constexpr int64_t kNoneBad = std::numeric_limits<int64_t>::max();

/// sums (n, 2) += x (n) f32 or f64, each element rounded to the nearest 2^-50, ties to even; = with
/// Into::overwrite. An element that is not below `limit` in magnitude, or not finite, counts as 0, and bad
/// (1, 2) = min(bad, first + its index).
void add_fixed(Context& ctx, Tensor sums, Tensor bad, const Tensor& x, double limit, int64_t first,
               Into into);
/// sum (n, 2) = over R of rows (R, n, 2). sum is none of the rows.
void sum_fixed_rows(Context& ctx, Tensor sum, const Tensor& rows);
/// x (n) = sums (n, 2), rounded to nearest.
void from_fixed(Context& ctx, Tensor x, const Tensor& sums);

}  // namespace sluice
