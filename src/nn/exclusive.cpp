#include "nn/exclusive.h"

#include "nn/weight_gradient.h"
#include "ops/exclusive.h"

namespace sluice {

Exclusive::Exclusive(const ModelConfig& config, ParamStore& store, const std::string& name)
    : store_(store),
      identity_(config.attention.exclusive == ExclusiveAttention::none),
      normed_(config.attention.output_norm != OutputNorm::none ||
              config.norm_placement == NormPlacement::sandwich) {
  if (config.attention.exclusive == ExclusiveAttention::learned)
    scale_ = store.add({.name = name,
                        .shape = {config.num_attention_heads},
                        .init = Init::constant(0),
                        .weight_decay = false});
}

Exclusive::Saved Exclusive::make_saved(Arena& arena, const std::string& name, const Tensor& x) const {
  return {identity_ ? x : arena.alloc(name, x.dtype, {x.dim(0), x.dim(1), x.dim(2)})};
}

void Exclusive::forward(Context& ctx, const Tensor& x, const Tensor& values, Saved& s) const {
  if (!identity_) exclusive_forward(ctx, s.y, x, values, scale(), normed_);
}

void Exclusive::backward(Context& ctx, Tensor dx, Tensor dvalues, const Tensor& dy, const Tensor& x,
                         const Tensor& values) const {
  if (identity_) return;
  backward_with_parameter(ctx, store_, dx, scale_ ? store_.grad(*scale_) : Tensor(),
                          [&](const Tensor& to, const Tensor& ds, const auto& operand) {
                            const Tensor of_dy = operand(dy), of_x = operand(x), of_values = operand(values);
                            exclusive_backward(ctx, to, operand(dvalues), ds, of_dy, of_x, of_values, scale(),
                                               normed_);
                          });
}

}  // namespace sluice
