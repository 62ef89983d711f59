#include "ops/reduce.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(sum_of_squares)
SLUICE_DECLARE_BACKENDS(sum)
SLUICE_DECLARE_BACKENDS(max_abs)

namespace sluice {

void sum_of_squares(Context& ctx, double* result, const Tensor& x) {
  check_floating("sum_of_squares", "x", x);
  SLUICE_DISPATCH(sum_of_squares, ctx, result, x);
}

void sum(Context& ctx, double* result, const Tensor& x) {
  check_floating("sum", "x", x);
  SLUICE_DISPATCH(sum, ctx, result, x);
}

void max_abs(Context& ctx, double* result, const Tensor& x) {
  check_floating("max_abs", "x", x);
  SLUICE_DISPATCH(max_abs, ctx, result, x);
}

}  // namespace sluice
