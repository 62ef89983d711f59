#include "ops/bit_sum.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(bit_sum)

namespace sluice {

void bit_sum(Context& ctx, Tensor sum, const Tensor& x, int64_t first, uint64_t seed) {
  check_floating("bit_sum", "x", x);
  check_count("bit_sum", "sum", sum, DType::i32, 2);
  SLUICE_DISPATCH(bit_sum, ctx, sum, x, first, seed);
}

}  // namespace sluice
