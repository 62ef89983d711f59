#include "ops/padding.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(clear_padding)

namespace sluice {

void clear_padding(Context& ctx, Tensor x, const Tensor& targets) {
  check_floating("clear_padding", "x", x);
  SLUICE_CHECK(x.rank >= 1, "clear_padding: x must be (T, ...), got {}", x.describe());
  check_tensor("clear_padding", "targets", targets, DType::i32, {x.dim(0)});
  SLUICE_DISPATCH(clear_padding, ctx, x, targets);
}

}  // namespace sluice
