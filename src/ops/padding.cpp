#include "ops/padding.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(clear_padding)

namespace sluice {

void clear_padding(Context& ctx, Tensor x, const Tensor& targets) {
  SLUICE_CHECK(x.rank >= 1 && (x.dtype == DType::f32 || x.dtype == DType::bf16 || x.dtype == DType::f64),
               "clear_padding: x must be (T, ...) of f32, bf16 or f64, got {}", x.describe());
  check_tensor("clear_padding", "targets", targets, DType::i32, {x.dim(0)});
  SLUICE_DISPATCH(clear_padding, ctx, x, targets);
}

}  // namespace sluice
