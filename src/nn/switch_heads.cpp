#include "nn/switch_heads.h"

#include "nn/init.h"
#include "nn/weight_gradient.h"
#include "ops/switch_heads.h"

namespace sluice {
namespace {

bool has_experts(const ModelConfig& config, SwitchHeads::Of of) {
  const SwitchHeadsConfig& experts = config.attention.switch_heads;
  return experts.num_experts > 0 &&
         (of == SwitchHeads::Of::values || experts.projections == SwitchProjections::key_value);
}

int64_t width_of(const ModelConfig& config) {
  const int64_t width = config.attention.switch_heads.expert_width;
  return width > 0 ? width : config.head_dim;
}

Tensor matrix(const Tensor& t) { return t.view({t.dim(0), t.numel() / t.dim(0)}); }

}  // namespace

int64_t SwitchHeads::rows(const ModelConfig& config, Of of) {
  if (!has_experts(config, of)) return config.num_key_value_heads * config.head_dim;
  return config.num_key_value_heads * config.attention.switch_heads.num_experts * width_of(config);
}

SwitchHeads::SwitchHeads(const ModelConfig& config, ParamStore& store, const std::string& name, Of of)
    : store_(store),
      heads_(config.num_key_value_heads),
      experts_(config.attention.switch_heads.num_experts),
      chosen_(config.attention.switch_heads.num_experts_per_tok),
      width_(width_of(config)),
      head_dim_(config.head_dim) {
  if (!has_experts(config, of)) return;
  router_ = store.add({.name = name,
                       .shape = {heads_ * experts_, config.hidden_size},
                       .init = matrix_init(config, heads_ * experts_, config.hidden_size),
                       .packed = true,
                       .orthogonal = experts_ == 1,  // a router is not a matrix for Muon
                       .when_frozen = WhenFrozen::adapted});
}

SwitchHeads::Saved SwitchHeads::make_saved(Arena& arena, const std::string& name, int64_t T,
                                           DType dtype) const {
  Saved s;
  s.y = arena.alloc(name, dtype, {T, heads_, head_dim_});
  s.projected = s.y;
  if (identity()) return s;
  s.logits = arena.alloc(name + "_switch.logits", dtype, {T, heads_, experts_});
  s.projected = arena.alloc(name + "_switch.projected", dtype, {T, heads_, experts_, width_});
  s.chosen = arena.alloc(name + "_switch.chosen", DType::i32, {T, heads_, chosen_});
  return s;
}

void SwitchHeads::forward(Context& ctx, const Tensor& hidden, Saved& s) const {
  if (identity()) return;
  linear_forward(ctx, matrix(s.logits), hidden, store_.linear(*router_));
  switch_heads_forward(ctx, s.y, s.chosen, s.logits, s.projected);
}

void SwitchHeads::backward(Context& ctx, Tensor dprojected, const Tensor& dy, const Tensor& hidden,
                           const Saved& s, Tensor dhidden, Into& into) const {
  if (identity()) return;
  ScratchScope t(ctx.scratch);
  const Tensor dlogits = t.like("switch.dlogits", s.logits);
  switch_heads_backward(ctx, dlogits, dprojected, dy, s.logits, s.projected, s.chosen);
  linear_backward_input(ctx, dhidden, matrix(dlogits), store_.linear(*router_), into);
  weight_backward(ctx, store_, *router_, matrix(dlogits), hidden);
  into = Into::add;
}

}  // namespace sluice
