#pragma once
// Loops over threads. OpenMP underneath, so that oneDNN's and our threads are one pool.
#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace sluice {

inline int num_threads() { return omp_get_max_threads(); }
inline void set_num_threads(int n) { omp_set_num_threads(n); }

/// Calls body(begin, end) on contiguous parts of [0, n), each at least `grain` long (but for the last).
/// Nothing may depend on how the range is cut: reductions across parts use chunks of a fixed size, summed in
/// order, so that results do not depend on the number of threads.
template <class Body>
void parallel_for(int64_t n, int64_t grain, Body&& body) {
  if (n <= 0) return;
  const int64_t parts = std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, num_threads());
  if (parts == 1 || omp_in_parallel()) {
    body(int64_t{0}, n);
    return;
  }
#pragma omp parallel num_threads(static_cast <int>(parts))
  {
    const int64_t i = omp_get_thread_num(), count = omp_get_num_threads();
    const int64_t begin = n * i / count, end = n * (i + 1) / count;
    if (begin < end) body(begin, end);
  }
}

}  // namespace sluice
