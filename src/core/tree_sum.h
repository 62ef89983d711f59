#pragma once
// The sum of many rows in an order that depends only on their number.
#include <cstdint>

namespace sluice {

/// Adds rows[1], rows[2], ... elementwise to rows[0], each of length n, as tree(0, count), where tree(a, m) =
/// tree(a, h) + tree(a + h, m - h) and h is the largest power of two below m. The other rows are overwritten.
void tree_sum(float* const* rows, int count, int64_t n);
void tree_sum(double* const* rows, int count, int64_t n);
void tree_sum(int64_t* const* rows, int count, int64_t n);

}  // namespace sluice
