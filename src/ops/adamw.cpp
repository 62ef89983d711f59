#include "ops/adamw.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(adamw_update)

namespace sluice {

void adamw_update(Context& ctx, Tensor value, Tensor master, Tensor m, Tensor v, const Tensor& gradient,
                  const AdamwStep& step) {
  check_floating("adamw_update", "value", value);
  const DType accumulate = accumulate_dtype(value.dtype);
  const int64_t count = value.numel();
  if (master || value.dtype != accumulate) check_count("adamw_update", "master", master, accumulate, count);
  check_count("adamw_update", "m", m, accumulate, count);
  check_count("adamw_update", "v", v, accumulate, count);
  check_count("adamw_update", "gradient", gradient, accumulate, count);
  SLUICE_CHECK(step.step >= 1, "adamw_update: step counts from 1, got {}", step.step);
  SLUICE_DISPATCH(adamw_update, ctx, value, master, m, v, gradient, step);
}

}  // namespace sluice
