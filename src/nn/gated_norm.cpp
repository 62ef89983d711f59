#include "nn/gated_norm.h"

#include "nn/init.h"
#include "nn/weight_gradient.h"
#include "ops/activation.h"
#include "ops/gate.h"

namespace sluice {
namespace {

Tensor one_head(const Tensor& t) { return t.view({t.dim(0), 1, t.dim(1)}); }

ParamStore::Id add_matrix(ParamStore& store, const std::string& name, int64_t out, int64_t in,
                          const Init& init) {
  return store.add({.name = name + ".weight",
                    .shape = {out, in},
                    .init = init,
                    .packed = true,
                    .when_frozen = WhenFrozen::adapted});
}

}  // namespace

GatedNorm::GatedNorm(const ModelConfig& config, ParamStore& store, const std::string& name)
    : store_(store),
      hidden_size_(config.hidden_size),
      rank_(config.gated_norm.rank),
      norm_(config, store, name + ".weight", {config.hidden_size}) {
  if (rank_ == 0) return;
  const int64_t C = hidden_size_;
  const bool zero = config.gated_norm.init == GateInit::zero;
  gate_ = Projections{};
  gate_->down = add_matrix(store, name + ".gate_down", rank_, C, matrix_init(config, rank_, C));
  gate_->up = add_matrix(store, name + ".gate_up", C, rank_,
                         zero ? Init::constant(0) : matrix_init(config, C, rank_));
}

GatedNorm::Saved GatedNorm::make_saved(Arena& arena, const std::string& name, DType dtype, int64_t T) const {
  Saved s;
  s.norm = norm_.make_saved(arena, name, dtype, {T, hidden_size_});
  s.y = s.norm.y;
  if (!gate_) return s;
  s.down = arena.alloc(name + ".down", dtype, {T, rank_});
  s.inner = arena.alloc(name + ".inner", dtype, {T, rank_});
  s.logits = arena.alloc(name + ".logits", dtype, {T, hidden_size_});
  s.y = arena.alloc(name + ".gated", dtype, {T, hidden_size_});
  return s;
}

Flops GatedNorm::flops() const {
  return gate_ ? product_flops(store_, gate_->down) + product_flops(store_, gate_->up) : Flops();
}

void GatedNorm::forward(Context& ctx, const Tensor& x, Saved& s) const {
  norm_.forward(ctx, x, s.norm);
  gate(ctx, s);
}

void GatedNorm::forward(Context& ctx, const Residual& x, Saved& s) const {
  norm_.forward(ctx, x, s.norm);
  gate(ctx, s);
}

void GatedNorm::gate(Context& ctx, Saved& s) const {
  if (!gate_) return;
  linear_forward(ctx, s.down, s.norm.y, store_.linear(gate_->down));
  silu_forward(ctx, s.inner, s.down);
  linear_forward(ctx, s.logits, s.inner, store_.linear(gate_->up));
  gate_forward(ctx, one_head(s.y), one_head(s.norm.y), one_head(s.logits), GateKind{});
}

void GatedNorm::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Saved& s,
                         Into into) const {
  if (!gate_) return norm_.backward(ctx, dx, dy, x, s.norm, into);
  ScratchScope t(ctx.scratch);
  const Tensor dn = t.like("gated_norm.dn", s.norm.y);
  gate_backward(ctx, dn, dy, s);
  norm_.backward(ctx, dx, dn, x, s.norm, into);
}

/// dn overwritten.
void GatedNorm::gate_backward(Context& ctx, Tensor dn, const Tensor& dy, const Saved& s) const {
  ScratchScope t(ctx.scratch);
  const Tensor dlogits = t.like("gated_norm.dlogits", s.logits),
               dinner = t.like("gated_norm.dinner", s.inner);
  sluice::gate_backward(ctx, one_head(dn), one_head(dlogits), one_head(dy), one_head(s.norm.y),
                        one_head(s.logits), GateKind{});
  linear_backward_input(ctx, dinner, dlogits, store_.linear(gate_->up), Into::overwrite);
  weight_backward(ctx, store_, gate_->up, dlogits, s.inner);
  silu_backward(ctx, dinner, dinner, s.down);
  linear_backward_input(ctx, dn, dinner, store_.linear(gate_->down), Into::add);
  weight_backward(ctx, store_, gate_->down, dinner, s.norm.y);
}

}  // namespace sluice
