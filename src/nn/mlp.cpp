#include "nn/mlp.h"

#include "nn/init.h"
#include "nn/weight_gradient.h"
#include "ops/activation.h"

namespace sluice {

Mlp::Mlp(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t intermediate_size)
    : store_(store),
      hidden_size_(config.hidden_size),
      intermediate_size_(intermediate_size),
      gated_(config.hidden_act == HiddenAct::silu) {
  const int64_t C = hidden_size_, F = intermediate_size_;
  ParamSpec spec{.name = prefix + ".gate_proj.weight",
                 .shape = {F, C},
                 .init = matrix_init(config, F, C),
                 .packed = true};
  spec.when_frozen = WhenFrozen::adapted;
  spec.summed_by_products = spec.mlp_inner = true;
  if (gated_) gate_up_proj_ = store.add(spec);
  spec.name = prefix + ".up_proj.weight";
  spec.joined = gated_;
  const ParamStore::Id up_proj = store.add(spec);
  if (!gated_) gate_up_proj_ = up_proj;
  spec.name = prefix + ".down_proj.weight";
  spec.shape = {C, F};
  spec.init = residual_init(config);
  spec.mlp_inner = spec.joined = false;
  down_proj_ = store.add(spec);
}

Flops Mlp::flops() const {
  const Flops up = gated_ ? product_flops(store_, gate_up_proj_ + 1) : Flops();
  return product_flops(store_, gate_up_proj_) + up + product_flops(store_, down_proj_);
}

Mlp::Saved Mlp::make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype,
                           bool keep_inner) const {
  Saved s;
  if (keep_inner) {
    s.gate_up = arena.alloc(name + ".gate_up", dtype, {num_tokens, up_width()});
    s.inner = arena.alloc(name + ".inner", dtype, {num_tokens, intermediate_size_});
  }
  s.y = arena.alloc(name + ".y", dtype, {num_tokens, hidden_size_});
  return s;
}

Mlp::Saved Mlp::kept_or_temporary(ScratchScope& t, const Saved& s, const Tensor& x) const {
  if (s.gate_up) return s;
  return {.gate_up = t.alloc("mlp.gate_up", x.dtype, {x.dim(0), up_width()}),
          .inner = t.alloc("mlp.inner", x.dtype, {x.dim(0), intermediate_size_}),
          .y = s.y};
}

void Mlp::inner_forward(Context& ctx, const Saved& s, const Tensor& x) const {
  linear_forward(ctx, s.gate_up, x, store_.joined(gate_up_proj_));
  if (gated_)
    swiglu_forward(ctx, s.inner, s.gate_up);
  else
    squared_relu_forward(ctx, s.inner, s.gate_up);
}

void Mlp::forward(Context& ctx, const Tensor& x, Saved& kept) const {
  ScratchScope t(ctx.scratch);
  const Saved s = kept_or_temporary(t, kept, x);
  inner_forward(ctx, s, x);
  linear_forward(ctx, s.y, s.inner, store_.linear(down_proj_));
}

void Mlp::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Saved& kept) const {
  ScratchScope t(ctx.scratch);
  const Saved s = kept_or_temporary(t, kept, x);
  if (!kept.gate_up) inner_forward(ctx, s, x);
  const Tensor dinner = t.like("mlp.dinner", s.inner), dgate_up = t.like("mlp.dgate_up", s.gate_up);

  linear_backward_input(ctx, dinner, dy, store_.linear(down_proj_), Into::overwrite);
  weight_backward(ctx, store_, down_proj_, dy, s.inner);
  if (gated_)
    swiglu_backward(ctx, dgate_up, dinner, s.gate_up);
  else
    squared_relu_backward(ctx, dgate_up, dinner, s.gate_up);
  linear_backward_input(ctx, dx, dgate_up, store_.joined(gate_up_proj_), Into::overwrite);
  weight_backward(ctx, store_, gate_up_proj_, dgate_up, x);
}

}  // namespace sluice
