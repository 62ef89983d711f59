#include "ops/reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#include "core/parallel_for.h"
#include "core/tree_sum.h"

#include "ops/cpu/isa_begin.h"
#include "ops/cpu/vector_math.h"

constexpr int64_t kChunk = 65536;

/// partials[k] = chunk_result(T*, count) of chunk k, or those of four whole chunks at once by
/// chunk_result.four(T*, partials), if it has that; then their combination with result's start, in order.
/// Which chunks are computed together does not depend on the threads.
template <class ChunkResult, class Combine>
void reduce_chunks(Context& ctx, const Tensor& result, const Tensor& x, Into into, ChunkResult&& chunk_result,
                   Combine&& combine) {
  const int64_t n = x.numel(), chunks = (n + kChunk - 1) / kChunk;
  ScratchScope scratch(ctx.scratch);
  const Tensor partials = scratch.alloc("reduce_partials", DType::f64, {std::max<int64_t>(chunks, 1)});
  if (ctx.dry_run) return;
  double* partial = partials.as<double>();
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr bool kHasFour = requires(const T* p) { chunk_result.four(p, partial); };
    constexpr int64_t kTogether = kHasFour ? 4 : 1;
    parallel_for((chunks + kTogether - 1) / kTogether, 1, [&](int64_t begin, int64_t end) {
      for (int64_t first = begin * kTogether; first < end * kTogether; first += kTogether) {
        if constexpr (kHasFour)
          if ((first + kTogether) * kChunk <= n) {
            chunk_result.four(x.as<T>() + first * kChunk, partial + first);
            continue;
          }
        for (int64_t k = first; k < std::min(chunks, first + kTogether); ++k)
          partial[k] = chunk_result(x.as<T>() + k * kChunk, std::min(kChunk, n - k * kChunk));
      }
    });
  });
  double total = 0;
  for (int64_t k = 0; k < chunks; ++k) total = combine(total, partial[k]);
  double& out = *result.as<double>();
  out = into == Into::add ? out + total : total;
}

namespace {

/// Sums of blocks that are added to the bins together, in vectors; sums in bins are exact, in any order.
constexpr int64_t kBlocksTogether = 64;

/// The sums s >= 0, cut into multiples of 2^40, 2^17, ...: adding and subtracting 1.5 x 2^(52 + e) rounds to
/// a multiple of 2^e. Overwrites s.
void add_to_square_bins(double* bins, double* s) {
  double magic = 0x1.8p92;
  for (int64_t k = 0; k < kSquareBins; ++k, magic *= 0x1p-23) {
    double bin = 0;
#pragma omp simd reduction(+ : bin)
    for (int64_t i = 0; i < kBlocksTogether; ++i) {
      const double part = (s[i] + magic) - magic;
      bin += part;
      s[i] -= part;
    }
    bins[k] += bin;
  }
}

struct Squares {
  template <class T>
  double operator()(const T* p, int64_t n) const {
    double s = 0;
#pragma omp simd reduction(+ : s)
    for (int64_t i = 0; i < n; ++i) {
      const double v = load(p + i);
      s += v * v;
    }
    return s;
  }

  /// The same bits for each of four chunks. Memory delivers four streams faster than one, and no sum waits
  /// for the one before.
  template <class T>
  void four(const T* p, double* sums) const {
    double s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < kChunk; ++i) {
      const double v0 = load(p + i), v1 = load(p + kChunk + i), v2 = load(p + 2 * kChunk + i),
                   v3 = load(p + 3 * kChunk + i);
      s0 += v0 * v0;
      s1 += v1 * v1;
      s2 += v2 * v2;
      s3 += v3 * v3;
    }
    sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
  }
};

}  // namespace

void sum_of_squares(Context& ctx, Tensor result, const Tensor& x) {
  reduce_chunks(ctx, result, x, Into::overwrite, Squares{}, [](double a, double b) { return a + b; });
}

void add_squares(Context& ctx, Tensor bins, const Tensor& x) {
  if (ctx.dry_run) return;
  const int64_t n = x.numel(), blocks = (n + kSquareBlock - 1) / kSquareBlock;
  std::mutex mutex;
  double* total = bins.as<double>();
  with_storage_type(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* p = x.as<T>();
    parallel_for(blocks, 1024, [&](int64_t begin, int64_t end) {
      double mine[kSquareBins] = {};
      for (int64_t first = begin; first < end; first += kBlocksTogether) {
        alignas(64) double sums[kBlocksTogether] = {};
        for (int64_t b = first; b < std::min(end, first + kBlocksTogether); ++b) {
          const double s = Squares{}(p + b * kSquareBlock, std::min(kSquareBlock, n - b * kSquareBlock));
          sums[b - first] = s < 0x1p63 ? s : std::numeric_limits<double>::infinity();
        }
        add_to_square_bins(mine, sums);
      }
      const std::scoped_lock lock(mutex);
      for (int64_t k = 0; k < kSquareBins; ++k) total[k] += mine[k];
    });
  });
}

void sum(Context& ctx, Tensor result, const Tensor& x, Into into) {
  reduce_chunks(
      ctx, result, x, into,
      [](const auto* p, int64_t n) {
        double s = 0;
#pragma omp simd reduction(+ : s)
        for (int64_t i = 0; i < n; ++i) s += static_cast<double>(load(p + i));
        return s;
      },
      [](double a, double b) { return a + b; });
}

template <class T>
void sum_rows_of(const Tensor& y, const Tensor& rows, Into into) {
  std::vector<T*> each;
  for (int64_t r = 0; r < rows.dim(0); ++r) each.push_back(rows.as<T>() + r * rows.dim(1));
  tree_sum(each.data(), static_cast<int>(each.size()), rows.dim(1));
  T* out = y.as<T>();
  const T* total = rows.as<T>();
  parallel_for(y.numel(), 16384, [&](int64_t begin, int64_t end) {
    if (into == Into::overwrite) {
      std::copy(total + begin, total + end, out + begin);
      return;
    }
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) out[i] += total[i];
  });
}

void sum_rows(Context& ctx, Tensor y, const Tensor& rows, Into into) {
  if (ctx.dry_run) return;
  y.dtype == DType::f64 ? sum_rows_of<double>(y, rows, into) : sum_rows_of<float>(y, rows, into);
}

/// |x| as an integer: the order of non-negative floats is that of their bits, with NaN above infinity.
inline int32_t magnitude(float x) { return std::bit_cast<int32_t>(x) & 0x7fffffff; }
inline int64_t magnitude(double x) { return std::bit_cast<int64_t>(x) & 0x7fffffffffffffff; }
inline double from_magnitude(int32_t bits) { return std::bit_cast<float>(bits); }
inline double from_magnitude(int64_t bits) { return std::bit_cast<double>(bits); }

void max_abs(Context& ctx, Tensor result, const Tensor& x) {
  reduce_chunks(
      ctx, result, x, Into::overwrite,
      [](const auto* p, int64_t n) {
        decltype(magnitude(load(p))) largest = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < n; ++i) largest = std::max(largest, magnitude(load(p + i)));
        return from_magnitude(largest);
      },
      // NaN wins, whichever side it is on.
      [](double a, double b) {
        if (a != a || b != b) return a + b;
        return std::max(a, b);
      });
}

#include "ops/cpu/isa_end.h"
