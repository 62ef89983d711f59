#include "core/tree_sum.h"

#include <algorithm>
#include <cstdint>

#include "core/parallel_for.h"

namespace sluice {
namespace {

template <class T>
void sum_block(T* const* rows, int first, int count, int64_t begin, int64_t end) {
  if (count == 1) return;
  int half = 1;
  while (2 * half < count) half *= 2;
  sum_block(rows, first, half, begin, end);
  sum_block(rows, first + half, count - half, begin, end);
  T* a = rows[first];
  const T* b = rows[first + half];
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) a[i] += b[i];
}

template <class T>
void sum_all(T* const* rows, int count, int64_t n) {
  constexpr int64_t kBlock =
      4096;  // elements of each row; the tree is traversed once per block, within the inner caches
  parallel_for((n + kBlock - 1) / kBlock, 4, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      sum_block(rows, 0, count, b * kBlock, std::min(n, (b + 1) * kBlock));
  });
}

}  // namespace

void tree_sum(float* const* rows, int count, int64_t n) { sum_all(rows, count, n); }
void tree_sum(double* const* rows, int count, int64_t n) { sum_all(rows, count, n); }
void tree_sum(int64_t* const* rows, int count, int64_t n) { sum_all(rows, count, n); }

}  // namespace sluice
