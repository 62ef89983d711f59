#include "ops/adamw.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(judge_update)
SLUICE_DECLARE_BACKENDS(adamw_update)

namespace sluice {

void judge_update(Context& ctx, Tensor control, const AdamwSettings& settings) {
  check_tensor("judge_update", "control", control, DType::f64, {kUpdateControl});
  SLUICE_DISPATCH(judge_update, ctx, control, settings);
}

void adamw_update(Context& ctx, Tensor value, Tensor master, Tensor m, Tensor v, const Tensor& gradient,
                  const Tensor& segments, const Tensor& control, const AdamwSettings& settings) {
  check_floating("adamw_update", "value", value);
  const DType accumulate = accumulate_dtype(value.dtype);
  const int64_t count = value.numel();
  if (master || value.dtype != accumulate) check_count("adamw_update", "master", master, accumulate, count);
  check_count("adamw_update", "m", m, accumulate, count);
  check_count("adamw_update", "v", v, accumulate, count);
  check_count("adamw_update", "gradient", gradient, accumulate, count);
  SLUICE_CHECK(segments.rank == 2, "adamw_update: segments must be (S, 4) f64, got {}", segments.describe());
  check_tensor("adamw_update", "segments", segments, DType::f64, {segments.dim(0), 4});
  check_tensor("adamw_update", "control", control, DType::f64, {kUpdateControl});
  SLUICE_DISPATCH(adamw_update, ctx, value, master, m, v, gradient, segments, control, settings);
}

}  // namespace sluice
