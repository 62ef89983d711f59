#include "ops/activation.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(silu_forward)
SLUICE_DECLARE_BACKENDS(silu_backward)
SLUICE_DECLARE_BACKENDS(squared_relu_forward)
SLUICE_DECLARE_BACKENDS(squared_relu_backward)
SLUICE_DECLARE_BACKENDS(swiglu_forward)
SLUICE_DECLARE_BACKENDS(swiglu_backward)
SLUICE_DECLARE_BACKENDS(weighted_swiglu_forward)
SLUICE_DECLARE_BACKENDS(weighted_swiglu_backward)

namespace sluice {
namespace {

void check_gate_up(const char* op, const Tensor& gate_up) {
  check_floating(op, "gate_up", gate_up);
  SLUICE_CHECK(gate_up.rank == 2 && gate_up.dim(1) % 2 == 0, "{}: gate_up must be (T, 2F), got {}", op,
               gate_up.describe());
}

void check_limit(const char* op, std::optional<double> limit) {
  SLUICE_CHECK(!limit || *limit > 0, "{}: limit must be above 0, got {}", op, limit.value_or(0));
}

}  // namespace

void silu_forward(Context& ctx, Tensor y, const Tensor& x) {
  check_floating("silu_forward", "x", x);
  check_like("silu_forward", "y", y, x);
  SLUICE_DISPATCH(silu_forward, ctx, y, x);
}

void silu_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x) {
  check_floating("silu_backward", "x", x);
  check_like("silu_backward", "dy", dy, x);
  check_like("silu_backward", "dx", dx, x);
  SLUICE_DISPATCH(silu_backward, ctx, dx, dy, x);
}

void squared_relu_forward(Context& ctx, Tensor y, const Tensor& x) {
  check_floating("squared_relu_forward", "x", x);
  check_like("squared_relu_forward", "y", y, x);
  SLUICE_DISPATCH(squared_relu_forward, ctx, y, x);
}

void squared_relu_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x) {
  check_floating("squared_relu_backward", "x", x);
  check_like("squared_relu_backward", "dy", dy, x);
  check_like("squared_relu_backward", "dx", dx, x);
  SLUICE_DISPATCH(squared_relu_backward, ctx, dx, dy, x);
}

void swiglu_forward(Context& ctx, Tensor y, const Tensor& gate_up) {
  check_gate_up("swiglu_forward", gate_up);
  check_tensor("swiglu_forward", "y", y, gate_up.dtype, {gate_up.dim(0), gate_up.dim(1) / 2});
  SLUICE_DISPATCH(swiglu_forward, ctx, y, gate_up);
}

void swiglu_backward(Context& ctx, Tensor dgate_up, const Tensor& dy, const Tensor& gate_up) {
  check_gate_up("swiglu_backward", gate_up);
  check_like("swiglu_backward", "dgate_up", dgate_up, gate_up);
  check_tensor("swiglu_backward", "dy", dy, gate_up.dtype, {gate_up.dim(0), gate_up.dim(1) / 2});
  SLUICE_DISPATCH(swiglu_backward, ctx, dgate_up, dy, gate_up);
}

void weighted_swiglu_forward(Context& ctx, Tensor y, const Tensor& gate_up, const Tensor& weights,
                             const Tensor& slots, std::optional<double> limit) {
  const char* op = "weighted_swiglu_forward";
  check_gate_up(op, gate_up);
  check_tensor(op, "y", y, gate_up.dtype, {gate_up.dim(0), gate_up.dim(1) / 2});
  check_tensor(op, "slots", slots, DType::i32, {gate_up.dim(0)});
  check_count(op, "weights", weights, accumulate_dtype(gate_up.dtype), weights.numel());
  check_limit(op, limit);
  SLUICE_DISPATCH(weighted_swiglu_forward, ctx, y, gate_up, weights, slots, limit);
}

void weighted_swiglu_backward(Context& ctx, Tensor dgate_up, Tensor dweights, const Tensor& dy,
                              const Tensor& gate_up, const Tensor& weights, const Tensor& slots,
                              std::optional<double> limit) {
  const char* op = "weighted_swiglu_backward";
  check_gate_up(op, gate_up);
  check_like(op, "dgate_up", dgate_up, gate_up);
  check_tensor(op, "dy", dy, gate_up.dtype, {gate_up.dim(0), gate_up.dim(1) / 2});
  check_tensor(op, "slots", slots, DType::i32, {gate_up.dim(0)});
  check_count(op, "weights", weights, accumulate_dtype(gate_up.dtype), weights.numel());
  check_like(op, "dweights", dweights, weights);
  check_limit(op, limit);
  SLUICE_DISPATCH(weighted_swiglu_backward, ctx, dgate_up, dweights, dy, gate_up, weights, slots, limit);
}

}  // namespace sluice
