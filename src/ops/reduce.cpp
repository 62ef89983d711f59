#include "ops/reduce.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(sum_of_squares)
SLUICE_DECLARE_BACKENDS(add_squares)
SLUICE_DECLARE_BACKENDS(sum)
SLUICE_DECLARE_BACKENDS(sum_rows)
SLUICE_DECLARE_BACKENDS(max_abs)

namespace sluice {

void sum_of_squares(Context& ctx, Tensor result, const Tensor& x) {
  check_floating("sum_of_squares", "x", x);
  check_tensor("sum_of_squares", "result", result, DType::f64, {1});
  SLUICE_DISPATCH(sum_of_squares, ctx, result, x);
}

void add_squares(Context& ctx, Tensor bins, const Tensor& x) {
  check_floating("add_squares", "x", x);
  check_tensor("add_squares", "bins", bins, DType::f64, {kSquareBins});
  SLUICE_DISPATCH(add_squares, ctx, bins, x);
}

double squares_of_bins(const double* bins) {
  double total = 0;
  for (int64_t k = 0; k < kSquareBins; ++k) total += bins[k];
  return total;
}

void sum(Context& ctx, Tensor result, const Tensor& x, Into into) {
  check_floating("sum", "x", x);
  check_tensor("sum", "result", result, DType::f64, {1});
  SLUICE_DISPATCH(sum, ctx, result, x, into);
}

void sum_rows(Context& ctx, Tensor y, const Tensor& rows, Into into) {
  SLUICE_CHECK(y.dtype == DType::f32 || y.dtype == DType::f64, "sum_rows: y must be f32 or f64, got {}",
               y.describe());
  check_tensor("sum_rows", "rows", rows, y.dtype, {rows.dim(0), y.numel()});
  SLUICE_DISPATCH(sum_rows, ctx, y, rows, into);
}

void max_abs(Context& ctx, Tensor result, const Tensor& x) {
  check_floating("max_abs", "x", x);
  check_tensor("max_abs", "result", result, DType::f64, {1});
  SLUICE_DISPATCH(max_abs, ctx, result, x);
}

}  // namespace sluice
