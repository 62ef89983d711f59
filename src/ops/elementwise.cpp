#include "ops/elementwise.h"

#include "ops/checks.h"
#include "ops/dispatch.h"

SLUICE_DECLARE_BACKENDS(add_forward)
SLUICE_DECLARE_BACKENDS(clip_forward)
SLUICE_DECLARE_BACKENDS(clip_backward)
SLUICE_DECLARE_BACKENDS(soft_cap_forward)
SLUICE_DECLARE_BACKENDS(cast)
SLUICE_DECLARE_BACKENDS(round_stochastically)
SLUICE_DECLARE_BACKENDS(fill)
SLUICE_DECLARE_BACKENDS(scale)

namespace sluice {

void add_forward(Context& ctx, Tensor y, const Tensor& a, const Tensor& b) {
  check_floating("add_forward", "a", a);
  check_like("add_forward", "b", b, a);
  check_like("add_forward", "y", y, a);
  SLUICE_DISPATCH(add_forward, ctx, y, a, b);
}

void clip_forward(Context& ctx, Tensor y, const Tensor& x, double limit) {
  check_floating("clip_forward", "x", x);
  check_like("clip_forward", "y", y, x);
  SLUICE_CHECK(limit > 0, "clip_forward: limit must be above 0, got {}", limit);
  SLUICE_DISPATCH(clip_forward, ctx, y, x, limit);
}

void clip_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, double limit) {
  check_floating("clip_backward", "x", x);
  check_like("clip_backward", "dy", dy, x);
  check_like("clip_backward", "dx", dx, x);
  SLUICE_CHECK(limit > 0, "clip_backward: limit must be above 0, got {}", limit);
  SLUICE_DISPATCH(clip_backward, ctx, dx, dy, x, limit);
}

void soft_cap_forward(Context& ctx, Tensor y, const Tensor& x, double cap) {
  check_floating("soft_cap_forward", "x", x);
  check_like("soft_cap_forward", "y", y, x);
  SLUICE_CHECK(cap > 0, "soft_cap_forward: cap must be above 0, got {}", cap);
  SLUICE_DISPATCH(soft_cap_forward, ctx, y, x, cap);
}

void cast(Context& ctx, Tensor y, const Tensor& x) {
  check_floating("cast", "x", x);
  check_floating("cast", "y", y);
  SLUICE_CHECK(y.rank == x.rank && y.shape == x.shape, "cast: y must have the shape of x, {}, got {}",
               x.describe(), y.describe());
  SLUICE_DISPATCH(cast, ctx, y, x);
}

void round_stochastically(Context& ctx, Tensor y, const Tensor& x, uint32_t key) {
  check_count("round_stochastically", "x", x, DType::f32, x.numel());
  check_count("round_stochastically", "y", y, DType::bf16, x.numel());
  SLUICE_DISPATCH(round_stochastically, ctx, y, x, key);
}

void fill(Context& ctx, Tensor y, double value) {
  check_floating("fill", "y", y);
  SLUICE_DISPATCH(fill, ctx, y, value);
}

void scale(Context& ctx, Tensor y, double factor) {
  check_floating("scale", "y", y);
  SLUICE_DISPATCH(scale, ctx, y, factor);
}

}  // namespace sluice
