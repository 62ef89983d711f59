// Sums over rows that chunks of rows have made apart. Include between isa_begin.h and isa_end.h.

namespace {

/// sums (n) += the first `chunks` rows of partials (.., n), one after the other, whatever the number of
/// threads.
template <class A>
void add_partials(const Tensor& sums, const Tensor& partials, int64_t chunks) {
  const int64_t n = partials.dim(1);
  A* const to = sums.as<A>();
  const A* const from = partials.as<A>();
  parallel_for(n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t k = 0; k < chunks; ++k) {
      const A* const part = from + k * n;
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) to[i] += part[i];
    }
  });
}

}  // namespace
