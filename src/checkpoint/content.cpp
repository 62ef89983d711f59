#include "checkpoint/content.h"

#include <spdlog/fmt/fmt.h>

#include "core/error.h"

namespace sluice {

std::vector<int64_t> whole_shape(const NamedTensor& t) {
  if (is_slice(t)) return t.shape;
  return {t.tensor.shape.begin(), t.tensor.shape.begin() + t.tensor.rank};
}

void check_slice(const NamedTensor& t) {
  if (!is_slice(t)) {
    SLUICE_CHECK(t.begin == 0, "{}: begins at element {}, but is not a slice", t.name, t.begin);
    return;
  }
  int64_t whole = 1;
  for (const int64_t dim : t.shape) whole *= dim;
  SLUICE_CHECK(t.tensor.rank == 1 && t.begin >= 0 && t.tensor.numel() <= whole - t.begin,
               "{}: {} from element {} on is not a slice of ({})", t.name, t.tensor.describe(), t.begin,
               fmt::join(t.shape, ", "));
}

}  // namespace sluice
