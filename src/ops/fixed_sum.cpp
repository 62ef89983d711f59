#include "ops/fixed_sum.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(add_fixed)
SLUICE_DECLARE_BACKENDS(sum_fixed_rows)
SLUICE_DECLARE_BACKENDS(from_fixed)

namespace sluice {
namespace {

void check_wide(const char* op, const Tensor& x) {
  SLUICE_CHECK(x.dtype == DType::f32 || x.dtype == DType::f64, "{}: x must be f32 or f64, got {}", op,
               x.describe());
}

}  // namespace

void add_fixed(Context& ctx, Tensor sums, Tensor bad, const Tensor& x, double limit, int64_t first,
               Into into) {
  check_wide("add_fixed", x);
  check_tensor("add_fixed", "sums", sums, DType::i32, {x.numel(), 2});
  check_tensor("add_fixed", "bad", bad, DType::i32, {1, 2});
  SLUICE_CHECK(limit > 0 && limit <= kFixedLimit, "add_fixed: limit {}", limit);
  SLUICE_DISPATCH(add_fixed, ctx, sums, bad, x, limit, first, into);
}

void sum_fixed_rows(Context& ctx, Tensor sum, const Tensor& rows) {
  check_tensor("sum_fixed_rows", "sum", sum, DType::i32, {sum.dim(0), 2});
  check_tensor("sum_fixed_rows", "rows", rows, DType::i32, {rows.dim(0), sum.dim(0), 2});
  SLUICE_DISPATCH(sum_fixed_rows, ctx, sum, rows);
}

void from_fixed(Context& ctx, Tensor x, const Tensor& sums) {
  check_wide("from_fixed", x);
  check_tensor("from_fixed", "sums", sums, DType::i32, {x.numel(), 2});
  SLUICE_DISPATCH(from_fixed, ctx, x, sums);
}

}  // namespace sluice
