#pragma once
// Sums, maxima and minima in f64 that sequences contribute to and ranks merge. A type lists its members in
// parts().
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace sluice {

enum class Merge : uint8_t { sum, largest, smallest };

/// Numbers of one kind. Their order and sizes depend only on the shapes of the model, so that all ranks
/// agree.
struct Part {
  Merge merge = Merge::sum;
  double* data = nullptr;
  int64_t size = 0;
};
using Parts = std::vector<Part>;

inline void add_part(Parts& parts, Merge merge, double& x) { parts.push_back({merge, &x, 1}); }
inline void add_part(Parts& parts, Merge merge, std::vector<double>& x) {
  parts.push_back({merge, x.data(), static_cast<int64_t>(x.size())});
}

inline int64_t packed_size(const Parts& parts) {
  int64_t size = 0;
  for (const Part& part : parts) size += part.size;
  return size;
}

inline void pack(double* packed, const Parts& parts) {
  for (const Part& part : parts) packed = std::copy_n(part.data, part.size, packed);
}

/// Merges the output of pack() for numbers of the same shapes into these. NaN is kept.
inline void merge_packed(const Parts& into, const double* packed) {
  for (const Part& part : into)
    for (int64_t i = 0; i < part.size; ++i, ++packed) {
      double& x = part.data[i];
      if (part.merge == Merge::sum)
        x += *packed;
      else if (std::isnan(*packed) || (part.merge == Merge::largest ? *packed > x : *packed < x))
        x = *packed;
    }
}

}  // namespace sluice
