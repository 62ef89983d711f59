#pragma once
// A sum of many rows whose order depends on their number alone.
#include <cstdint>

namespace sluice {

/// Adds rows[1], rows[2], ... to rows[0], elementwise, n long, as tree(0, count): tree(a, m) = tree(a, h) +
/// tree(a + h, m - h) with h the largest power of two below m. The other rows are used up.
void tree_sum(float* const* rows, int count, int64_t n);
void tree_sum(double* const* rows, int count, int64_t n);
void tree_sum(int64_t* const* rows, int count, int64_t n);

}  // namespace sluice
