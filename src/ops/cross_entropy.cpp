#include "ops/cross_entropy.h"

#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(cross_entropy_forward)
SLUICE_DECLARE_BACKENDS(cross_entropy_forward_backward)

namespace sluice {
namespace {

void check(const char* op, const Tensor& losses, const Tensor& hidden, const LinearWeight& head,
           const Tensor& targets, double soft_cap) {
  SLUICE_CHECK(soft_cap >= 0, "{}: soft_cap must not be negative, got {}", op, soft_cap);
  SLUICE_CHECK(hidden.dtype == DType::f32 || hidden.dtype == DType::bf16 || hidden.dtype == DType::f64,
               "{}: elements must be f32, bf16 or f64, got {}", op, dtype_name(hidden.dtype));
  SLUICE_CHECK(hidden.rank == 2, "{}: hidden must be (T, C), got {}", op, hidden.describe());
  SLUICE_CHECK(head.value.rank == 2, "{}: head must be (V, C), got {}", op, head.value.describe());
  check_tensor(op, "head", head.value, hidden.dtype, {head.value.dim(0), hidden.dim(1)});
  check_tensor(op, "losses", losses, accumulate_dtype(hidden.dtype), {hidden.dim(0)});
  check_tensor(op, "targets", targets, DType::i32, {hidden.dim(0)});
}

}  // namespace

void cross_entropy_forward(Context& ctx, Tensor losses, const Tensor& hidden, const LinearWeight& head,
                           const Tensor& targets, double soft_cap) {
  check("cross_entropy_forward", losses, hidden, head, targets, soft_cap);
  SLUICE_DISPATCH(cross_entropy_forward, ctx, losses, hidden, head, targets, soft_cap);
}

void cross_entropy_forward_backward(Context& ctx, Tensor losses, Tensor dhidden, Tensor dweight,
                                    const Tensor& hidden, const LinearWeight& head, const Tensor& targets,
                                    const Tensor& gradient_scale, double soft_cap, const LogitZLoss& z,
                                    Into into_dweight) {
  const char* op = "cross_entropy_forward_backward";
  check(op, losses, hidden, head, targets, soft_cap);
  check_tensor(op, "dhidden", dhidden, hidden.dtype, {hidden.dim(0), hidden.dim(1)});
  if (dweight)
    check_tensor(op, "dweight", dweight, accumulate_dtype(hidden.dtype), {head.value.dim(0), hidden.dim(1)});
  check_tensor(op, "gradient_scale", gradient_scale, DType::f64, {1});
  SLUICE_CHECK(z.coefficient >= 0, "{}: the z-loss's coefficient must not be negative, got {}", op,
               z.coefficient);
  if (z.squares) check_tensor(op, "squares", z.squares, accumulate_dtype(hidden.dtype), {hidden.dim(0)});
  SLUICE_DISPATCH(cross_entropy_forward_backward, ctx, losses, dhidden, dweight, hidden, head, targets,
                  gradient_scale, soft_cap, z, into_dweight);
}

}  // namespace sluice
