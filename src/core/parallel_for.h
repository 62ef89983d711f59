#pragma once
// Parallel loops on OpenMP, so that oneDNN and Sluice share one thread pool.
#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace sluice {

inline int num_threads() { return omp_get_max_threads(); }
inline void set_num_threads(int n) { omp_set_num_threads(n); }

/// Calls body(begin, end) on contiguous parts of [0, n), each at least `grain` long (except the last).
/// Results must not depend on how the range is divided: reductions across parts use chunks of fixed size,
/// summed in order, so that the number of threads does not matter.
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
