#include "ops/norm_rope.h"

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/rope.h"

SLUICE_DECLARE_BACKENDS(norm_rope_forward)
SLUICE_DECLARE_BACKENDS(norm_rope_backward)

namespace sluice {
namespace {

void check_norm_rope(const char* op, const Tensor& out, const Tensor& rstd, const Tensor& x,
                     const Tensor& weight, const Tensor& positions, const Tensor& cos, const Tensor& sin) {
  check_floating(op, "x", x);
  SLUICE_CHECK(x.rank == 3 && x.dim(2) % 2 == 0, "{}: x must be (T, H, D) with D even, got {}", op,
               x.describe());
  const int64_t T = x.dim(0), H = x.dim(1), D = x.dim(2);
  const DType wide = accumulate_dtype(x.dtype);
  check_rows_like(op, "the output", out, x);
  check_tensor(op, "rstd", rstd, wide, {T * H});
  if (weight.rank == 1)
    check_tensor(op, "weight", weight, x.dtype, {D});
  else if (weight)
    check_tensor(op, "weight", weight, x.dtype, {H, D});
  check_tensor(op, "positions", positions, DType::i32, {T});
  SLUICE_CHECK(cos.rank == 2, "{}: cos must be (positions, D/2), got {}", op, cos.describe());
  check_tensor(op, "cos", cos, wide, {cos.dim(0), D / 2});
  check_tensor(op, "sin", sin, wide, {cos.dim(0), D / 2});
}

}  // namespace

void norm_rope_forward(Context& ctx, Tensor y, Tensor rstd, const Tensor& x, const Tensor& weight, double eps,
                       const Tensor& positions, const Tensor& cos, const Tensor& sin) {
  check_norm_rope("norm_rope_forward", y, rstd, x, weight, positions, cos, sin);
  check_like("norm_rope_forward", "y", y, x);
  SLUICE_DISPATCH(norm_rope_forward, ctx, y, rstd, x, weight, eps, positions, cos, sin);
}

void norm_rope_backward(Context& ctx, Tensor dx, Tensor dweight, const Tensor& dy, const Tensor& x,
                        const Tensor& weight, const Tensor& rstd, const Tensor& positions, const Tensor& cos,
                        const Tensor& sin) {
  check_norm_rope("norm_rope_backward", dx, rstd, x, weight, positions, cos, sin);
  check_like("norm_rope_backward", "dy", dy, x);
  if (weight)
    check_count("norm_rope_backward", "dweight", dweight, accumulate_dtype(x.dtype), weight.numel());
  else
    SLUICE_CHECK(dweight.empty(), "norm_rope_backward: dweight without a weight, got {}", dweight.describe());
  SLUICE_DISPATCH(norm_rope_backward, ctx, dx, dweight, dy, x, weight, rstd, positions, cos, sin);
}

void position_backward(Context& ctx, const PositionBackward& p, const Tensor& dy) {
  if (p.rstd)
    norm_rope_backward(ctx, p.dx, p.dweight, dy, p.x, p.weight, p.rstd, p.positions, p.cos, p.sin);
  else
    rope_backward(ctx, p.dx, dy, p.positions, p.cos, p.sin);
}

}  // namespace sluice
