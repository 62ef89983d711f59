#include "ops/low_rank.h"

#include "ops/columns.h"
#include "ops/elementwise.h"

namespace sluice {
namespace {

int64_t rank_of(const LowRank& l) { return l.a->value.dim(0); }

/// s x A^T, (T, r).
Tensor reduced(Context& ctx, ScratchScope& t, const Tensor& x, const LowRank& l) {
  const Tensor h = t.alloc("low_rank.xa", x.dtype, {x.dim(0), rank_of(l)});
  linear_forward(ctx, h, x, *l.a);
  scale(ctx, h, l.scale);
  return h;
}

/// s dy B, (T, r).
Tensor reduced_gradient(Context& ctx, ScratchScope& t, const Tensor& dy, const LowRank& l) {
  const Tensor dh = t.alloc("low_rank.dyb", dy.dtype, {dy.dim(0), rank_of(l)});
  linear_backward_input(ctx, dh, dy, *l.b, Into::overwrite);
  scale(ctx, dh, l.scale);
  return dh;
}

/// The adapter's columns of dy.
Tensor columns(Context& ctx, ScratchScope& t, const Tensor& dy, const LowRank& l) {
  const int64_t n = l.b->value.dim(0);
  if (n == dy.dim(1)) return dy;
  const Tensor part = t.alloc("low_rank.dy", dy.dtype, {dy.dim(0), n});
  take_columns(ctx, part, dy, l.begin);
  return part;
}

}  // namespace

void low_rank_forward(Context& ctx, Tensor y, const Tensor& x, const LowRank& l) {
  ScratchScope t(ctx.scratch);
  const Tensor h = reduced(ctx, t, x, l),
               change = t.alloc("low_rank.y", y.dtype, {y.dim(0), l.b->value.dim(0)});
  linear_forward(ctx, change, h, *l.b);
  add_columns(ctx, y, change, l.begin);
}

void low_rank_backward_input(Context& ctx, Tensor dx, const Tensor& dy, const LowRank& l) {
  ScratchScope t(ctx.scratch);
  const Tensor dh = reduced_gradient(ctx, t, columns(ctx, t, dy, l), l);
  linear_backward_input(ctx, dx, dh, *l.a, Into::add);
}

void low_rank_backward_weight(Context& ctx, Tensor da, Tensor db, const Tensor& dy, const Tensor& x,
                              const LowRank& l) {
  ScratchScope t(ctx.scratch);
  const Tensor d = columns(ctx, t, dy, l), h = reduced(ctx, t, x, l), dh = reduced_gradient(ctx, t, d, l);
  linear_backward_weight(ctx, db, d, h);
  linear_backward_weight(ctx, da, dh, x);
}

}  // namespace sluice
