#include "ops/rmsnorm.h"

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/elementwise.h"

SLUICE_DECLARE_BACKENDS(rmsnorm_forward)
SLUICE_DECLARE_BACKENDS(rmsnorm_backward)
SLUICE_DECLARE_CUDA(add_rmsnorm_forward)

namespace sluice {
namespace {

/// x (..., D) against weight (D) or (G, D) and rstd, one per row.
void check_rows(const char* op, const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  check_floating(op, "x", x);
  const int64_t width = x.dim(-1), rows = width ? x.numel() / width : 0;
  check_count(op, "rstd", rstd, accumulate_dtype(x.dtype), rows);
  SLUICE_CHECK(width > 0, "{}: x must have elements in a row, got {}", op, x.describe());
  if (!weight) return;
  SLUICE_CHECK(weight.dtype == x.dtype && (weight.rank == 1 || weight.rank == 2) && weight.dim(-1) == width,
               "{}: weight must be ({}) or (G, {}) {}, got {}", op, width, width, dtype_name(x.dtype),
               weight.describe());
  const int64_t groups = weight.numel() / width;
  SLUICE_CHECK(groups > 0 && rows % groups == 0, "{}: {} rows of x cannot share {} rows of weight", op, rows,
               groups);
}

}  // namespace

void rmsnorm_forward(Context& ctx, Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight, double eps) {
  check_rows("rmsnorm_forward", x, weight, rstd);
  check_like("rmsnorm_forward", "y", y, x);
  SLUICE_CHECK(eps >= 0, "rmsnorm_forward: eps must not be negative, got {}", eps);
  SLUICE_DISPATCH(rmsnorm_forward, ctx, y, rstd, x, weight, eps);
}

void add_rmsnorm_forward(Context& ctx, Tensor sum, Tensor y, Tensor rstd, const Tensor& a, const Tensor& b,
                         const Tensor& weight, double eps) {
  check_rows("add_rmsnorm_forward", a, weight, rstd);
  check_like("add_rmsnorm_forward", "b", b, a);
  check_like("add_rmsnorm_forward", "sum", sum, a);
  check_like("add_rmsnorm_forward", "y", y, a);
  SLUICE_CHECK(eps >= 0, "add_rmsnorm_forward: eps must not be negative, got {}", eps);
  SLUICE_DISPATCH_CUDA_ONLY(add_rmsnorm_forward, ctx, sum, y, rstd, a, b, weight, eps);
  add_forward(ctx, sum, a, b);
  rmsnorm_forward(ctx, y, rstd, sum, weight, eps);
}

void rmsnorm_backward(Context& ctx, Tensor dx, Tensor dweight, const Tensor& dy, const Tensor& x,
                      const Tensor& weight, const Tensor& rstd, Into into) {
  check_rows("rmsnorm_backward", x, weight, rstd);
  check_like("rmsnorm_backward", "dy", dy, x);
  check_like("rmsnorm_backward", "dx", dx, x);
  SLUICE_CHECK(dweight.rank == weight.rank && dweight.shape == weight.shape &&
                   (!weight || dweight.dtype == accumulate_dtype(x.dtype)),
               "rmsnorm_backward: dweight must have the shape of weight, {}, and be {}, got {}",
               weight.describe(), dtype_name(accumulate_dtype(x.dtype)), dweight.describe());
  SLUICE_DISPATCH(rmsnorm_backward, ctx, dx, dweight, dy, x, weight, rstd, into);
}

}  // namespace sluice
