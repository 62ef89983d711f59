#include "nn/gate.h"

#include "nn/init.h"
#include "nn/weight_gradient.h"

namespace sluice {

Gate::Gate(const ModelConfig& model, const GateConfig& config, ParamStore& store, const std::string& name,
           int64_t heads, int64_t channels)
    : config_(config), store_(store), heads_(heads), channels_(channels) {
  const bool headwise = config.granularity == GateGranularity::headwise;
  if (config.input == GateInput::hidden) {
    const int64_t rows = headwise ? heads : heads * channels;
    weight_ = store.add({.name = name,
                         .shape = {rows, model.hidden_size},
                         .init = matrix_init(model, rows, model.hidden_size),
                         .packed = true,
                         .when_frozen = WhenFrozen::adapted});
  } else {
    // Zero: every sigmoid score starts at 1/2 (Qiu et al. 2025). A rank-1 parameter where there is one head
    // or one channel.
    std::vector<int64_t> shape = {heads, channels};
    if (headwise) shape = {heads};
    if (heads == 1) shape = {headwise ? 1 : channels};
    weight_ = store.add({.name = name, .shape = shape, .init = Init::constant(0), .weight_decay = false});
  }
}

Gate::Saved Gate::make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype) const {
  Saved s;
  if (config_.input == GateInput::hidden) {
    s.z = config_.granularity == GateGranularity::headwise
              ? arena.alloc(name + ".logits", dtype, {num_tokens, heads_})
              : arena.alloc(name + ".logits", dtype, {num_tokens, heads_, channels_});
  }
  s.y = arena.alloc(name + ".gated", dtype, {num_tokens, heads_, channels_});
  return s;
}

Tensor Gate::as_logits(const Tensor& parameter) const {
  return config_.granularity == GateGranularity::headwise ? parameter.view({1, heads_})
                                                          : parameter.view({1, heads_, channels_});
}

Tensor Gate::logits(const Saved& s) const {
  return config_.input == GateInput::hidden ? s.z : as_logits(store_.value(weight_));
}

void Gate::logits_forward(Context& ctx, const Tensor& hidden, Saved& s) const {
  const int64_t T = s.z.dim(0);
  linear_forward(ctx, s.z.view({T, s.z.numel() / T}), hidden, store_.linear(weight_));
}

void Gate::logits_backward(Context& ctx, const Tensor& dz, const Tensor& hidden, Tensor dhidden,
                           Into& into) const {
  const Tensor rows = dz.view({dz.dim(0), dz.numel() / dz.dim(0)});
  linear_backward_input(ctx, dhidden, rows, store_.linear(weight_), into);
  weight_backward(ctx, store_, weight_, rows, hidden);
  into = Into::add;
}

void Gate::forward(Context& ctx, const Tensor& x, const Tensor& hidden, Saved& s) const {
  if (config_.input == GateInput::hidden) logits_forward(ctx, hidden, s);
  gate_forward(ctx, s.y, x.view({s.y.dim(0), heads_, channels_}), logits(s), kind());
}

void Gate::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Tensor& hidden,
                    const Saved& s, Tensor dhidden, Into& into, const Tensor& dhead) const {
  const int64_t T = s.y.dim(0);
  const auto view = [&](const Tensor& t) { return t.view({T, heads_, channels_}); };
  if (config_.input == GateInput::none) {
    gate_backward(ctx, view(dx), as_logits(store_.grad(weight_)), view(dy), view(x), logits(s), kind(),
                  dhead);
    return;
  }
  ScratchScope t(ctx.scratch);
  const Tensor dz = t.like("gate.dz", s.z);
  gate_backward(ctx, view(dx), dz, view(dy), view(x), s.z, kind(), dhead);
  logits_backward(ctx, dz, hidden, dhidden, into);
}

}  // namespace sluice
