#include "nn/moe.h"

#include <algorithm>

#include "comm/reduce.h"
#include "nn/init.h"
#include "ops/activation.h"
#include "ops/elementwise.h"
#include "ops/grouped_linear.h"

namespace sluice {

void Moe::forward(Context& ctx, const Tensor& x, const RouterLoad& load, Saved& kept) const {
  const Tensor logits = kept.probabilities;  // becomes them
  router_logits_forward(ctx, logits, x, store_.linear(router_));
  route_forward(ctx, kept.probabilities, kept.lse, kept.weights, kept.experts, logits, config_.norm_topk_prob);
  permute_plan(ctx, kept.permutation, kept.experts);
  router_load(ctx, kept.counts, load.layer(layer_), kept.permutation.offsets, kept.probabilities, kept.lse);
  count_with_ranks(ctx, load);
  shared_forward(ctx, x, kept);

  ScratchScope t(ctx.scratch);
  const Saved s = kept_or_temporary(t, kept, x);
  const Tensor out = t.alloc("moe.out", x.dtype, {s.permutation.slots.dim(0), hidden_size_});
  inner_forward(ctx, s, x);
  grouped_linear_forward(ctx, out, s.inner, store_.joined(down_proj_), s.permutation.offsets, Tensor());
  unpermute(ctx, s.y, out, s.permutation.rows, shared_ ? Into::add : Into::overwrite);
}

void Moe::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const RouterLoad& load,
                   const Saved& kept) const {
  ScratchScope t(ctx.scratch);
  const Saved s = kept_or_temporary(t, kept, x);
  if (!kept.gate_up) inner_forward(ctx, s, x);
  const Permutation& p = s.permutation;
  const Tensor dinner = t.like("moe.dinner", s.inner), dgate_up = t.like("moe.dgate_up", s.gate_up);
  const Tensor drows = t.alloc("moe.drows", x.dtype, {p.slots.dim(0), hidden_size_});
  const Tensor dweights = t.like("moe.dweights", s.weights), dlogits = t.like("moe.dlogits", s.probabilities);

  grouped_linear_backward_input(ctx, dinner, dy, store_.joined(down_proj_), p.offsets, p.tokens);
  grouped_linear_backward_weight(ctx, store_.joined_grad(down_proj_), dy, s.inner, p.offsets, p.tokens, Tensor());
  weighted_swiglu_backward(ctx, dgate_up, dweights, dinner, s.gate_up, s.weights, p.slots);
  grouped_linear_backward_input(ctx, drows, dgate_up, store_.joined(gate_up_proj_), p.offsets, Tensor());
  grouped_linear_backward_weight(ctx, store_.joined_grad(gate_up_proj_), dgate_up, x, p.offsets, Tensor(), p.tokens);
  shared_backward(ctx, dx, dy, x, s);
  unpermute(ctx, dx, drows, p.rows, shared_ ? Into::add : Into::overwrite);

  const bool global = config_.load_balance.scope == BalanceScope::global_batch && load.totals;
  const Tensor counts = global ? load.layer_counts(layer_, config_.num_experts) : s.counts;
  const double token = load.share / static_cast<double>(std::max<int64_t>(x.dim(0), 1));
  route_backward(ctx, dlogits, dweights, s.probabilities, s.lse, s.weights, s.experts, counts, config_.norm_topk_prob,
                 {.balance = config_.load_balance.coefficient * token, .z = config_.router_z_loss_coefficient * token});
  router_logits_backward(ctx, dx, store_.grad(router_), dlogits, x, store_.linear(router_), Into::add);
}

/// The balance loss of the global batch sees what every rank has counted.
void Moe::count_with_ranks(Context& ctx, const RouterLoad& load) const {
  if (!load.counts || ctx.dry_run || config_.load_balance.scope != BalanceScope::global_batch) return;
  const Tensor counts = load.layer_counts(layer_, config_.num_experts);
  std::copy_n(load.layer(layer_).as<double>(), config_.num_experts, counts.as<double>());
  all_reduce(*load.ranks, counts.as<double>(), config_.num_experts);
}

void Moe::inner_forward(Context& ctx, const Saved& s, const Tensor& x) const {
  grouped_linear_forward(ctx, s.gate_up, x, store_.joined(gate_up_proj_), s.permutation.offsets, s.permutation.tokens);
  weighted_swiglu_forward(ctx, s.inner, s.gate_up, s.weights, s.permutation.slots);
}

Tensor Moe::shared_y(const Saved& s) const { return s.shared.y.view({s.y.dim(0), 1, hidden_size_}); }

void Moe::shared_forward(Context& ctx, const Tensor& x, Saved& s) const {
  if (!shared_) return;
  shared_->forward(ctx, x, s.shared);
  if (shared_gate_) shared_gate_->forward(ctx, shared_y(s), x, s.shared_gate);
  cast(ctx, s.y, shared_gate_ ? s.shared_gate.y.view({s.y.dim(0), hidden_size_}) : s.shared.y);
}

/// dx overwritten.
void Moe::shared_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Saved& s) const {
  if (!shared_) return;
  if (!shared_gate_) return shared_->backward(ctx, dx, dy, x, s.shared);
  ScratchScope t(ctx.scratch);
  const Tensor dshared = t.like("moe.dshared", dy), dhidden = t.like("moe.dshared_gate", dy);
  const std::initializer_list<int64_t> heads = {dy.dim(0), 1, hidden_size_};
  Into into = Into::overwrite;
  shared_gate_->backward(ctx, dshared.view(heads), dy.view(heads), shared_y(s), x, s.shared_gate, dhidden, into);
  shared_->backward(ctx, dx, dshared, x, s.shared);
  add_forward(ctx, dx, dx, dhidden);
}

Moe::Moe(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t layer, Communicator* experts)
    : config_(config.moe), store_(store), layer_(layer), hidden_size_(config.hidden_size) {
  SLUICE_CHECK(!experts || experts->size() == 1, "Moe: experts across ranks");
  const int64_t C = config.hidden_size, F = config_.moe_intermediate_size, E = config_.num_experts;
  const Init init = Init::normal(config.initializer_range);
  router_ = store.add({.name = prefix + ".gate.weight", .shape = {E, C}, .init = init, .packed = true});
  ParamSpec spec{.name = "", .shape = {}, .packed = true, .groups = E};
  spec.of_expert = true;
  spec.active = static_cast<double>(config_.num_experts_per_tok) / static_cast<double>(E);
  const auto add = [&](int64_t expert, const char* what, std::vector<int64_t> shape, Init expert_init) {
    spec.name = prefix + ".experts." + std::to_string(expert) + what;
    spec.shape = std::move(shape);
    spec.init = expert_init;
    const ParamStore::Id id = store.add(spec);
    spec.joined = true;
    return id;
  };
  for (int64_t e = 0; e < E; ++e) {
    const ParamStore::Id id = add(e, ".gate_proj.weight", {F, C}, init);
    if (e == 0) gate_up_proj_ = id;
    add(e, ".up_proj.weight", {F, C}, init);
  }
  spec.joined = false;
  for (int64_t e = 0; e < E; ++e) {
    const ParamStore::Id id = add(e, ".down_proj.weight", {C, F}, residual_init(config));
    if (e == 0) down_proj_ = id;
  }
  if (config_.shared_expert_intermediate_size == 0) return;
  shared_.emplace(config, store, prefix + ".shared_expert", config_.shared_expert_intermediate_size);
  if (!config_.shared_expert_gate) return;
  const GateConfig gate{.position = GatePosition::dense_output, .granularity = GateGranularity::headwise};
  shared_gate_.emplace(config, gate, store, prefix + ".shared_expert_gate.weight", 1, C);
}

Moe::Saved Moe::make_saved(Arena& arena, const std::string& name, int64_t T, DType dtype, bool keep_inner) const {
  const int64_t E = config_.num_experts, K = config_.num_experts_per_tok, R = T * K, F = config_.moe_intermediate_size;
  const DType wide = accumulate_dtype(dtype);
  Saved s;
  s.probabilities = arena.alloc(name + ".probabilities", wide, {T, E});
  s.lse = arena.alloc(name + ".lse", wide, {T});
  s.weights = arena.alloc(name + ".weights", wide, {T, K});
  s.experts = arena.alloc(name + ".experts", DType::i32, {T, K});
  s.counts = arena.alloc(name + ".counts", DType::f64, {E});
  s.permutation = {.offsets = arena.alloc(name + ".offsets", DType::i32, {E + 1}),
                   .slots = arena.alloc(name + ".slots", DType::i32, {R}),
                   .tokens = arena.alloc(name + ".tokens", DType::i32, {R}),
                   .rows = arena.alloc(name + ".rows", DType::i32, {T, K})};
  if (keep_inner) {
    s.gate_up = arena.alloc(name + ".gate_up", dtype, {R, 2 * F});
    s.inner = arena.alloc(name + ".inner", dtype, {R, F});
  }
  if (shared_) s.shared = shared_->make_saved(arena, name + ".shared_expert", T, dtype, keep_inner);
  if (shared_gate_) s.shared_gate = shared_gate_->make_saved(arena, name + ".shared_expert_gate", T, dtype);
  s.y = arena.alloc(name + ".y", dtype, {T, hidden_size_});
  return s;
}

Moe::Saved Moe::kept_or_temporary(ScratchScope& t, const Saved& kept, const Tensor& x) const {
  Saved s = kept;
  if (s.gate_up) return s;
  const int64_t R = s.permutation.slots.dim(0), F = config_.moe_intermediate_size;
  s.gate_up = t.alloc("moe.gate_up", x.dtype, {R, 2 * F});
  s.inner = t.alloc("moe.inner", x.dtype, {R, F});
  return s;
}

}  // namespace sluice
