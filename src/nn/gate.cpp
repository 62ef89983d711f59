#include "nn/gate.h"

#include "nn/init.h"
#include "nn/weight_gradient.h"
#include "ops/columns.h"
#include "ops/elementwise.h"
#include "ops/padding.h"

namespace sluice {
namespace {

/// A bias is a gate that adds one score per channel, the same for every token.
constexpr GateKind kBias = {.activation = GateActivation::identity, .combine = GateCombine::add};

Tensor matrix(const Tensor& t) { return t.view({t.dim(0), t.numel() / t.dim(0)}); }

/// A matrix (T, n), or a vector (n), as the gate ops take them: one head.
Tensor one_head(const Tensor& t) {
  return t.rank == 1 ? t.view({1, 1, t.dim(0)}) : t.view({t.dim(0), 1, t.dim(1)});
}

}  // namespace

Gate::Gate(const ModelConfig& model, const GateConfig& config, ParamStore& store, const std::string& name,
           int64_t heads, int64_t channels, bool input_projection)
    : config_(config), store_(store), heads_(heads), channels_(channels) {
  const bool headwise = config.granularity == GateGranularity::headwise;
  if (!projects()) {
    // Zero: every sigmoid score starts at 1/2 (Qiu et al. 2025). A rank-1 parameter where there is one head
    // or one channel.
    std::vector<int64_t> shape = {heads, channels};
    if (headwise) shape = {heads};
    if (heads == 1) shape = {headwise ? 1 : channels};
    weight_ = store.add(
        {.name = name + ".weight", .shape = shape, .init = Init::constant(0), .weight_decay = false});
    return;
  }
  const int64_t rows = headwise ? heads : heads * channels, columns = input_size(model);
  weight_ = store.add(
      {.name = name + ".weight",
       .shape = {rows, columns},
       .init = config.init == GateInit::zero ? Init::constant(0) : matrix_init(model, rows, columns),
       .packed = true,
       .joined = input_projection,
       .joined_in_backward = input_projection,
       .when_frozen = WhenFrozen::adapted,
       .summed_by_products = true});
  if (config.bias)
    bias_ = store.add({.name = name + ".bias",
                       .shape = {rows},
                       .init = Init::constant(*config.bias),
                       .weight_decay = false});
}

int64_t Gate::input_size(const ModelConfig& model) const {
  if (config_.input == GateInput::self) return heads_ * channels_;
  return config_.input_channels > 0 ? config_.input_channels : model.hidden_size;
}

Gate::Saved Gate::make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype) const {
  Saved s;
  if (projects()) {
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

Tensor Gate::logits(const Saved& s) const { return projects() ? s.z : as_logits(store_.value(weight_)); }

Tensor Gate::leading_channels(Context& ctx, ScratchScope& t, const Tensor& hidden) const {
  const int64_t n = config_.input_channels;
  if (n == 0 || n == hidden.dim(1)) return hidden;
  const Tensor part = t.alloc("gate.input", hidden.dtype, {hidden.dim(0), n});
  take_columns(ctx, part, hidden, 0);
  return part;
}

/// s.z from u (T, n).
void Gate::project(Context& ctx, const Tensor& u, Saved& s) const {
  const Tensor z = matrix(s.z);
  linear_forward(ctx, z, u, store_.linear(weight_));
  if (bias_) gate_forward(ctx, one_head(z), one_head(z), one_head(store_.value(*bias_)), kBias);
}

void Gate::project_backward(Context& ctx, Tensor du, const Tensor& dz, const Tensor& u, Into into) const {
  const Tensor rows = matrix(dz);
  if (bias_) {
    ScratchScope t(ctx.scratch);
    const Tensor d = one_head(summed_rows(ctx, t, store_, rows));
    gate_backward(ctx, d, one_head(store_.grad(*bias_)), d, d, one_head(store_.value(*bias_)), kBias);
  }
  linear_backward_input(ctx, du, rows, store_.linear(weight_), into);
  weight_backward(ctx, store_, weight_, rows, u);
}

void Gate::logits_forward(Context& ctx, const Tensor& hidden, Saved& s) const {
  ScratchScope t(ctx.scratch);
  project(ctx, leading_channels(ctx, t, hidden), s);
}

void Gate::logits_backward(Context& ctx, const Tensor& dz, const Tensor& hidden, Tensor dhidden,
                           Into& into) const {
  ScratchScope t(ctx.scratch);
  const Tensor u = leading_channels(ctx, t, hidden);
  if (u.dim(1) == hidden.dim(1)) {
    project_backward(ctx, dhidden, dz, u, into);
  } else {
    const Tensor du = t.like("gate.dinput", u);
    project_backward(ctx, du, dz, u, Into::overwrite);
    if (into == Into::overwrite) fill(ctx, dhidden, 0);
    add_columns(ctx, dhidden, du, 0);
  }
  into = Into::add;
}

void Gate::forward(Context& ctx, const Tensor& x, const Tensor& hidden, Saved& s) const {
  if (config_.input == GateInput::hidden) logits_forward(ctx, hidden, s);
  if (config_.input == GateInput::self) project(ctx, matrix(x), s);
  gate_forward(ctx, s.y, x.view({s.y.dim(0), heads_, channels_}), logits(s), kind());
}

void Gate::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Tensor& hidden,
                    const Saved& s, Tensor dhidden, Into& into, const Tensor& dhead,
                    const Tensor& targets) const {
  const int64_t T = s.y.dim(0);
  const auto view = [&](const Tensor& t) { return t.view({T, heads_, channels_}); };
  if (!projects()) {
    return backward_with_parameter(ctx, store_, view(dx), as_logits(store_.grad(weight_)),
                                   [&](const Tensor& to, const Tensor& dz, const auto& operand) {
                                     gate_backward(ctx, to, dz, operand(view(dy)), operand(view(x)),
                                                   logits(s), kind(), dhead);
                                   });
  }
  ScratchScope t(ctx.scratch);
  const Tensor dz = t.like("gate.dz", s.z);
  gate_backward(ctx, view(dx), dz, view(dy), view(x), s.z, kind(), dhead);
  if (dhead && targets) clear_padding(ctx, dz, targets);
  if (config_.input == GateInput::self)
    project_backward(ctx, matrix(dx), dz, matrix(x), Into::add);
  else
    logits_backward(ctx, dz, hidden, dhidden, into);
}

}  // namespace sluice
