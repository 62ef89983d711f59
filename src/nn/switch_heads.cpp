#include "nn/switch_heads.h"

#include "nn/init.h"
#include "nn/weight_gradient.h"
#include "ops/switch_heads.h"

namespace sluice {
namespace {

int64_t width_of(const ModelConfig& config) {
  const int64_t width = config.attention.switch_heads.expert_width;
  return width > 0 ? width : config.head_dim;
}

Tensor matrix(const Tensor& t) { return t.view({t.dim(0), t.numel() / t.dim(0)}); }

}  // namespace

int64_t SwitchHeads::rows(const ModelConfig& config) {
  return config.num_key_value_heads * config.attention.switch_heads.num_experts * width_of(config);
}

SwitchHeads::SwitchHeads(const ModelConfig& config, ParamStore& store, const std::string& name)
    : store_(store),
      router_(store.add(
          {.name = name,
           .shape = {config.num_key_value_heads * config.attention.switch_heads.num_experts,
                     config.hidden_size},
           .init = matrix_init(config, config.num_key_value_heads * config.attention.switch_heads.num_experts,
                               config.hidden_size),
           .packed = true,
           .orthogonal = config.attention.switch_heads.num_experts == 1,  // a router's rows are no matrix
           .when_frozen = WhenFrozen::adapted})),
      heads_(config.num_key_value_heads),
      experts_(config.attention.switch_heads.num_experts),
      chosen_(config.attention.switch_heads.num_experts_per_tok),
      width_(width_of(config)) {}

SwitchHeads::Saved SwitchHeads::make_saved(Arena& arena, const std::string& name, int64_t T,
                                           DType dtype) const {
  return {.logits = arena.alloc(name + ".logits", dtype, {T, heads_, experts_}),
          .projected = arena.alloc(name + ".projected", dtype, {T, heads_, experts_, width_}),
          .chosen = arena.alloc(name + ".chosen", DType::i32, {T, heads_, chosen_})};
}

void SwitchHeads::forward(Context& ctx, Tensor y, const Tensor& hidden, Saved& s) const {
  linear_forward(ctx, matrix(s.logits), hidden, store_.linear(router_));
  switch_heads_forward(ctx, y, s.chosen, s.logits, s.projected);
}

void SwitchHeads::backward(Context& ctx, Tensor dprojected, const Tensor& dy, const Tensor& hidden,
                           const Saved& s, Tensor dhidden, Into& into) const {
  ScratchScope t(ctx.scratch);
  const Tensor dlogits = t.like("switch.dlogits", s.logits);
  switch_heads_backward(ctx, dlogits, dprojected, dy, s.logits, s.projected, s.chosen);
  linear_backward_input(ctx, dhidden, matrix(dlogits), store_.linear(router_), into);
  weight_backward(ctx, store_, router_, matrix(dlogits), hidden);
  into = Into::add;
}

}  // namespace sluice
