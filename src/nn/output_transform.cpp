#include "nn/output_transform.h"

#include "ops/activation.h"

namespace sluice {

OutputTransform::OutputTransform(const ModelConfig& config, ParamStore& store, const std::string& name)
    : silu_(config.attention.output_activation == OutputActivation::silu) {
  const OutputNorm norm = config.attention.output_norm;
  if (norm == OutputNorm::none) return;
  std::vector<int64_t> shape = {config.num_attention_heads, config.head_dim};
  if (norm == OutputNorm::rmsnorm_shared) shape = {config.head_dim};
  norm_.emplace(config, store, name, shape);
}

OutputTransform::Saved OutputTransform::make_saved(Arena& arena, const std::string& name,
                                                   const Tensor& x) const {
  Saved s;
  s.norm.y = x;
  if (norm_) s.norm = norm_->make_saved(arena, name + ".norm", x.dtype, {x.dim(0), x.dim(1), x.dim(2)});
  s.y = silu_ ? arena.alloc(name + ".act", x.dtype, {x.dim(0), x.dim(1), x.dim(2)}) : s.norm.y;
  return s;
}

void OutputTransform::forward(Context& ctx, const Tensor& x, Saved& s) const {
  if (norm_) norm_->forward(ctx, x, s.norm);
  if (silu_) silu_forward(ctx, s.y, s.norm.y);
}

void OutputTransform::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x,
                               const Saved& s) const {
  if (silu_) silu_backward(ctx, dx, dy, s.norm.y);
  if (norm_) norm_->backward(ctx, dx, silu_ ? dx : dy, x, s.norm);
}

}  // namespace sluice
