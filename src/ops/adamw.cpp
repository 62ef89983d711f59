#include "ops/adamw.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(judge_update)
SLUICE_DECLARE_BACKENDS(adamw_update)
SLUICE_DECLARE_CPU(adamw_update_summed)

namespace sluice {

void judge_update(Context& ctx, Tensor control, const AdamwSettings& settings) {
  check_tensor("judge_update", "control", control, DType::f64, {kUpdateControl});
  SLUICE_DISPATCH(judge_update, ctx, control, settings);
}

namespace {

void check_update(const char* op, const Tensor& value, const Tensor& master, const Tensor& m, const Tensor& v,
                  const Tensor& gradient, const Tensor& segments, const Tensor& control) {
  check_floating(op, "value", value);
  const DType accumulate = accumulate_dtype(value.dtype);
  const int64_t count = value.numel();
  if (master || value.dtype != accumulate) check_count(op, "master", master, accumulate, count);
  check_count(op, "m", m, accumulate, count);
  check_count(op, "v", v, accumulate, count);
  check_count(op, "gradient", gradient, accumulate, count);
  SLUICE_CHECK(segments.rank == 2, "{}: segments must be (S, 4) f64, got {}", op, segments.describe());
  check_tensor(op, "segments", segments, DType::f64, {segments.dim(0), 4});
  check_tensor(op, "control", control, DType::f64, {kUpdateControl});
}

}  // namespace

void adamw_update(Context& ctx, Tensor value, Tensor master, Tensor m, Tensor v, const Tensor& gradient,
                  const Tensor& segments, const Tensor& control, const AdamwSettings& settings) {
  check_update("adamw_update", value, master, m, v, gradient, segments, control);
  SLUICE_DISPATCH(adamw_update, ctx, value, master, m, v, gradient, segments, control, settings);
}

void adamw_update_summed(Context& ctx, Tensor sums, Tensor value, Tensor master, Tensor m, Tensor v,
                         const Tensor& gradient, const Tensor& segments, const Tensor& control,
                         const AdamwSettings& settings) {
  check_update("adamw_update_summed", value, master, m, v, gradient, segments, control);
  check_tensor("adamw_update_summed", "sums", sums, DType::i32, {segments.dim(0), 2});
  SLUICE_CHECK(ctx.device == Device::cpu, "adamw_update_summed has no CUDA kernel");
  const ProfileScope profile_scope(ctx.profile, "adamw_update");
  SLUICE_DISPATCH_CPU(adamw_update_summed, ctx, sums, value, master, m, v, gradient, segments, control,
                      settings)
}

}  // namespace sluice
