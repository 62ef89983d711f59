// Memory-bound: one read and one write of x; mapping in rope_rows.cuh. Not yet run on a GPU.
#include "ops/rope.h"
#include "rope_rows.cuh"

namespace sluice::cuda {
namespace {

void turn(Context& ctx, const char* name, const Tensor& y, const Tensor& x, const Tensor& positions,
          const Tensor& cos, const Tensor& sin, float direction) {
  dispatch_storage(name, x, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    launch_rope<false, T>(
        ctx, name,
        {device_data<T>(y), y.stride(), device_data<T>(x), rope_angles(ctx, positions, cos, sin, direction),
         x.dim(0), static_cast<int>(x.dim(1)), 1, Divider(1), nullptr, nullptr, 0, 0.f});
  });
}

}  // namespace

void rope_forward(Context& ctx, Tensor y, const Tensor& x, const Tensor& positions, const Tensor& cos,
                  const Tensor& sin) {
  if (ctx.dry_run) return;
  turn(ctx, "rope_forward", y, x, positions, cos, sin, 1.f);
}

void rope_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& positions, const Tensor& cos,
                   const Tensor& sin) {
  if (ctx.dry_run) return;
  turn(ctx, "rope_backward", dx, dy, positions, cos, sin, -1.f);
}

}  // namespace sluice::cuda
