#include "ops/muon.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(muon_momentum)
SLUICE_DECLARE_BACKENDS(newton_schulz)
SLUICE_DECLARE_BACKENDS(muon_apply)

namespace sluice {
namespace {

void check_matrix(const char* op, const char* argument, const Tensor& t) {
  check_floating(op, argument, t);
  SLUICE_CHECK(t.rank == 2, "{}: {} must be a matrix, got {}", op, argument, t.describe());
}

}  // namespace

void muon_momentum(Context& ctx, Tensor update, Tensor m, const Tensor& gradient, const Tensor& control,
                   const MuonSettings& settings) {
  const char* op = "muon_momentum";
  check_matrix(op, "m", m);
  check_matrix(op, "update", update);
  SLUICE_CHECK(m.dtype != DType::bf16, "{}: m must be f32 or f64, got {}", op, m.describe());
  SLUICE_CHECK(accumulate_dtype(update.dtype) == m.dtype && update.shape == m.shape,
               "{}: update must be {} or bf16, got {}", op, m.describe(), update.describe());
  check_like(op, "gradient", gradient, m);
  check_tensor(op, "control", control, DType::f64, {kUpdateControl});
  SLUICE_CHECK(settings.momentum_warmup_steps >= 0, "{}: momentum_warmup_steps must not be negative", op);
  SLUICE_DISPATCH(muon_momentum, ctx, update, m, gradient, control, settings);
}

void newton_schulz(Context& ctx, Tensor x, const Tensor& squares, int64_t steps) {
  check_matrix("newton_schulz", "x", x);
  check_tensor("newton_schulz", "squares", squares, DType::f64, {1});
  SLUICE_CHECK(steps >= 0, "newton_schulz: steps must not be negative, got {}", steps);
  SLUICE_DISPATCH(newton_schulz, ctx, x, squares, steps);
}

void muon_apply(Context& ctx, Tensor value, Tensor master, const Tensor& update, const Tensor& control,
                double lr_multiplier, double weight_decay) {
  const char* op = "muon_apply";
  check_matrix(op, "value", value);
  const DType accumulate = accumulate_dtype(value.dtype);
  if (master || value.dtype != accumulate)
    check_tensor(op, "master", master, accumulate, {value.dim(0), value.dim(1)});
  SLUICE_CHECK(accumulate_dtype(update.dtype) == accumulate && update.has_shape({value.dim(0), value.dim(1)}),
               "{}: update must have the shape of value, {}, got {}", op, value.describe(),
               update.describe());
  check_tensor(op, "control", control, DType::f64, {kUpdateControl});
  SLUICE_DISPATCH(muon_apply, ctx, value, master, update, control, lr_multiplier, weight_decay);
}

}  // namespace sluice
