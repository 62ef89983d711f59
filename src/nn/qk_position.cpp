#include "nn/qk_position.h"

#include "ops/rope.h"

namespace sluice {

QkPosition::QkPosition(const ModelConfig& config, ParamStore& store, const std::string& name)
    : norm_first_(config.qk_norm_order == QkNormOrder::before_rope) {
  if (config.qk_norm) norm_.emplace(config, store, name, std::vector<int64_t>{config.head_dim});
}

QkPosition::Saved QkPosition::make_saved(Arena& arena, const std::string& name, const Tensor& x) const {
  if (norm_) return norm_->make_saved(arena, name, x.dtype, {x.dim(0), x.dim(1), x.dim(2)});
  return {.y = x, .rstd = {}};
}

void QkPosition::forward(Context& ctx, const Tensor& x, const Sequence& sequence, Saved& s) const {
  const Tensor &positions = sequence.positions, &cos = sequence.rope_cos, &sin = sequence.rope_sin;
  if (norm_ && norm_first_) return norm_->forward_rope(ctx, x, positions, cos, sin, s);
  rope_forward(ctx, x, x, positions, cos, sin);
  if (norm_) norm_->forward(ctx, x, s);
}

void QkPosition::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x,
                          const Sequence& sequence, const Saved& s) const {
  const Tensor &positions = sequence.positions, &cos = sequence.rope_cos, &sin = sequence.rope_sin;
  if (norm_ && norm_first_) return norm_->backward_rope(ctx, dx, dy, x, positions, cos, sin, s);
  if (norm_) norm_->backward(ctx, dy, dy, x, s);
  rope_backward(ctx, dx, dy, positions, cos, sin);
}

std::optional<PositionBackward> QkPosition::arguments(const Tensor& dx, const Tensor& x,
                                                      const Sequence& sequence, const Saved& s) const {
  const Tensor &positions = sequence.positions, &cos = sequence.rope_cos, &sin = sequence.rope_sin;
  if (!norm_) return PositionBackward{.dx = dx, .positions = positions, .cos = cos, .sin = sin};
  if (!norm_first_) return {};
  return norm_->rope_arguments(dx, x, positions, cos, sin, s);
}

}  // namespace sluice
