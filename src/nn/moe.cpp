#include "nn/moe.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "comm/reduce.h"
#include "nn/init.h"
#include "ops/activation.h"
#include "ops/elementwise.h"
#include "ops/grouped_linear.h"
#include "ops/padding.h"

namespace sluice {

Tensor make_router_totals(const ModelConfig& config, Arena& arena) {
  const int64_t experts = config.moe.num_experts;
  if (experts == 0) return {};
  return arena.alloc("router.totals", DType::f64, {config.num_hidden_layers, router_totals_size(experts)});
}

void Moe::forward(Context& ctx, const Tensor& x, const RouterLoad& load, Saved& kept) const {
  const Tensor logits = kept.probabilities;  // becomes them
  router_logits_forward(ctx, logits, x, store_.linear(router_));
  router_bias_.forward(ctx, logits);
  route_forward(ctx, kept.probabilities, kept.lse, kept.weights, kept.experts, logits,
                config_.norm_topk_prob);
  permute_plan(ctx, kept.permutation, kept.experts);
  // Over whole sequences backward routes once more, and counts.
  count(ctx, store_.token_rows() ? RouterLoad() : load, kept);
  shared_forward(ctx, x, kept);

  ScratchScope t(ctx.scratch);
  const Tensor out = t.alloc("moe.out", x.dtype, {kept.permutation.slots.dim(0), hidden_size_});
  if (with_ranks()) {
    ranks_forward(ctx, out, x, load, kept);
  } else {
    const Rows rows = all_rows(kept.gate_up ? kept : temporary(t, kept, x), x);
    inner_forward(ctx, rows);
    down_forward(ctx, out, rows);
  }
  unpermute(ctx, kept.y, out, kept.permutation.rows, shared_ ? Into::add : Into::overwrite);
}

void Moe::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const RouterLoad& load,
                   const Saved& s) const {
  if (store_.token_rows()) return whole_backward(ctx, dx, dy, x, load);
  ScratchScope t(ctx.scratch);
  const Permutation& p = s.permutation;
  const Tensor drows = t.alloc("moe.drows", x.dtype, {p.slots.dim(0), hidden_size_});
  const Tensor dweights = t.like("moe.dweights", s.weights), dlogits = t.like("moe.dlogits", s.probabilities);
  if (with_ranks()) {
    ranks_backward(ctx, drows, dweights, dy, x, s);
  } else {
    const Rows rows = all_rows(s.gate_up ? s : temporary(t, s, x), x);
    if (!s.gate_up) inner_forward(ctx, rows);
    rows_backward(ctx, drows, dweights, t.like("moe.dgate_up", rows.gate_up), dy, p.tokens, rows);
  }
  shared_backward(ctx, dx, dy, x, s);
  unpermute(ctx, dx, drows, p.rows, shared_ ? Into::add : Into::overwrite);

  const Tensor counts = balance_counts(load, s);
  const double token = load.token_weight ? 1 : 1.0 / static_cast<double>(std::max<int64_t>(x.dim(0), 1));
  route_backward(ctx, dlogits, dweights, s.probabilities, s.lse, s.weights, s.experts, counts,
                 config_.norm_topk_prob,
                 {.balance = config_.load_balance.coefficient * token,
                  .z = config_.router_z_loss_coefficient * token,
                  .token_weight = load.token_weight});
  if (load.targets) clear_padding(ctx, dlogits, load.targets);
  router_bias_.backward(ctx, dlogits);
  router_logits_backward(ctx, dx, store_.grad(router_), dlogits, x, store_.linear(router_), Into::add);
}

void Moe::whole_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x,
                         const RouterLoad& load) const {
  const TokenRows& tokens = *store_.token_rows();
  const WholeSequences whole_sequences(store_);
  ScratchScope t(ctx.scratch);
  const Tensor all_x = tokens.whole(ctx, t, x), all_dy = tokens.whole(ctx, t, dy),
               all_dx = tokens.room(t, dx);
  Saved s = make_saved(ctx.scratch, "moe.whole", all_x.dim(0), x.dtype, /*keep_inner=*/true);
  RouterLoad counted = load;
  if (load.targets) counted.targets = tokens.whole(ctx, t, load.targets);
  RouterLoad first = counted;
  first.extra_rounds = nullptr;  // forward has counted its own
  forward(ctx, all_x, first, s);
  backward(ctx, all_dx, all_dy, all_x, counted, s);
  tokens.take_own(ctx, dx, all_dx);
}

/// (E): what the balance loss takes the experts' shares from.
Tensor Moe::balance_counts(const RouterLoad& load, const Saved& s) const {
  if (!load.totals) return s.counts;
  switch (config_.load_balance.scope) {
    case BalanceScope::global_batch:
      return load.layer_counts(layer_, config_.num_experts);
    case BalanceScope::previous_step:
      return load.previous.rows(layer_, 1).view({config_.num_experts});
    case BalanceScope::micro_batch:
      return s.counts;
  }
  fail(ExitCode::internal, "unknown scope");
}

void Moe::count(Context& ctx, const RouterLoad& load, const Saved& s) const {
  if (load.sequences) return count_sequences(ctx, load, s);
  router_load(ctx, s.counts, load.layer(layer_), s.permutation.offsets, s.probabilities, s.lse, s.experts,
              load.targets);
  count_with_ranks(ctx, load);
}

/// The balance loss of a micro-batch sees what all ranks have counted that share its sequences; so does what
/// is reported of it: E times the sum of f_e, of all these ranks, and p_e, of this rank's tokens.
void Moe::count_sequences(Context& ctx, const RouterLoad& load, const Saved& s) const {
  SLUICE_CHECK(ctx.device == Device::cpu, "moe: ranks share sequences on a CPU only");
  ScratchScope t(ctx.scratch);
  const int64_t experts = config_.num_experts;
  const Tensor totals = load.layer(layer_), before = totals ? t.like("moe.totals", totals) : Tensor();
  if (totals) copy(ctx, before, totals);
  router_load(ctx, s.counts, totals, s.permutation.offsets, s.probabilities, s.lse, s.experts, load.targets);
  if (ctx.dry_run) return;
  double* const counts = s.counts.as<double>();
  all_reduce(*load.sequences, counts, experts);
  if (!totals) return;
  double *const sums = totals.as<double>(), *const old = before.as<double>();
  double all = 0, loss = 0;
  for (int64_t e = 0; e < experts; ++e) {
    all += counts[e];
    loss += counts[e] * (sums[experts + e] - old[experts + e]);
  }
  sums[2 * experts] = old[2 * experts] + static_cast<double>(experts) * loss / all;
}

/// The balance loss of the global batch sees what every rank has counted.
void Moe::count_with_ranks(Context& ctx, const RouterLoad& load) const {
  if (!load.counts || ctx.dry_run) return;
  const int64_t experts = config_.num_experts;
  const Tensor mine = load.layer(layer_).rows(0, experts), counts = load.layer_counts(layer_, experts);
  const Tensor host = ctx.device == Device::cpu ? counts : load.host_counts;
  copy(ctx, host, mine);
  synchronize(ctx);
  all_reduce(*load.ranks, host.as<double>(), experts);
  copy(ctx, counts, host);
}

void Moe::inner_forward(Context& ctx, const Rows& r) const {
  grouped_linear_forward(ctx, r.gate_up, r.x, store_.joined(gate_up_proj_), r.offsets, r.tokens);
  if (gate_up_bias_)
    bias_forward(ctx, r.gate_up, store_.joined(*gate_up_bias_).value, {.offsets = r.offsets});
  weighted_swiglu_forward(ctx, r.inner, r.gate_up, r.weights, r.slots, config_.swiglu_limit);
}

/// r.inner has the rows' weights already; the bias still needs them.
void Moe::down_forward(Context& ctx, const Tensor& out, const Rows& r) const {
  grouped_linear_forward(ctx, out, r.inner, store_.joined(down_proj_), r.offsets, Tensor());
  if (down_bias_) bias_forward(ctx, out, store_.joined(*down_bias_).value, r.weighted());
}

void Moe::rows_backward(Context& ctx, Tensor dx, Tensor dweights, Tensor dgate_up, const Tensor& dy,
                        const Tensor& dy_index, const Rows& r) const {
  ScratchScope t(ctx.scratch);
  const Tensor dinner = t.like("moe.dinner", r.inner);
  const int source = store_.grad_sources() > 1 ? r.source : 0;
  const auto add_bias_gradient = [&](const std::optional<ParamStore::Id>& id, const Tensor& d,
                                     const Tensor& d_index, const BiasRows& rows) {
    if (id && store_.trains(*id)) bias_backward(ctx, store_.joined_grad(*id, source), d, d_index, rows);
  };
  const auto add_gradient = [&](ParamStore::Id id, const Tensor& d, const Tensor& x, const Tensor& d_index,
                                const Tensor& x_index) {
    if (!store_.trains(id)) return;
    const ParamStore::Sum sum = store_.next_sum(id, source);
    grouped_linear_backward_weight(ctx, sum.to, d, x, r.offsets, d_index, x_index, sum.into);
  };
  grouped_linear_backward_input(ctx, dinner, dy, store_.joined(down_proj_), r.offsets, dy_index);
  add_gradient(down_proj_, dy, r.inner, dy_index, Tensor());
  add_bias_gradient(down_bias_, dy, dy_index, r.weighted());
  weighted_swiglu_backward(ctx, dgate_up, dweights, dinner, r.gate_up, r.weights, r.slots,
                           config_.swiglu_limit);
  if (down_bias_)
    bias_backward_weights(ctx, dweights, dy, dy_index, store_.joined(*down_bias_).value, r.weighted());
  add_bias_gradient(gate_up_bias_, dgate_up, Tensor(), {.offsets = r.offsets});
  grouped_linear_backward_input(ctx, dx, dgate_up, store_.joined(gate_up_proj_), r.offsets, Tensor());
  add_gradient(gate_up_proj_, dgate_up, r.x, Tensor(), r.tokens);
}

void Moe::ranks_forward(Context& ctx, Tensor out, const Tensor& x, const RouterLoad& load,
                        const Saved& kept) const {
  ScratchScope t(ctx.scratch);
  const Saved again = temporary(t, kept, x);
  const Tensor received_out =
      again.received_x;  // overwrites rows that backward does not need, or has just used
  Dispatch::plan(ctx, ranks_, kept.rank_counts, kept.permutation);
  Dispatch dispatch(ctx, t, ranks_, kept.rank_counts, kept.permutation, received_out.dim(0));
  while (dispatch.next()) {
    const Saved& s = kept.gate_up && dispatch.round() == 0 ? kept : again;
    send_rows(dispatch, s, x);
    for (int source = 0; source < ranks_.size(); ++source) {
      const bool own = source == ranks_.rank();
      const Rows rows = own ? own_rows(s, dispatch, x) : received_rows(s, dispatch, source);
      const Dispatch::Part part = dispatch.from(source);
      inner_forward(ctx, rows);
      down_forward(
          ctx, own ? out.rows(dispatch.own_place(), part.count) : received_out.rows(part.begin, part.count),
          rows);
    }
    dispatch.from_experts(out, received_out, Tensor());
  }
  if (load.extra_rounds && !ctx.dry_run) *load.extra_rounds += dispatch.round() - 1;
}

void Moe::ranks_backward(Context& ctx, Tensor drows, Tensor dweights, const Tensor& dy, const Tensor& x,
                         const Saved& kept) const {
  ScratchScope t(ctx.scratch);
  const Saved again = temporary(t, kept, x);
  const Tensor received_d = t.like("moe.received_dy", again.received_x);  // dy, then dx of the same rows
  const Tensor received_dweights = t.like("moe.received_dweights", again.received_weights);
  const Permutation& p = kept.permutation;
  Dispatch dispatch(ctx, t, ranks_, kept.rank_counts, p, received_d.dim(0));
  while (dispatch.next()) {
    const bool computed = kept.gate_up && dispatch.round() == 0;
    const Saved& s = computed ? kept : again;
    if (!computed) send_rows(dispatch, s, x);
    dispatch.to_experts(received_d, dy, p.tokens);
    for (int source = 0; source < ranks_.size(); ++source) {
      const bool own = source == ranks_.rank();
      const Rows rows = own ? own_rows(s, dispatch, x) : received_rows(s, dispatch, source);
      const Dispatch::Part part = dispatch.from(source);
      if (!computed) inner_forward(ctx, rows);
      const Tensor d =
          own ? drows.rows(dispatch.own_place(), part.count) : received_d.rows(part.begin, part.count);
      rows_backward(ctx, d, own ? dweights : received_dweights, again.gate_up.rows(part.begin, part.count),
                    own ? dy : d, rows.tokens, rows);
    }
    dispatch.from_experts(drows, received_d, Tensor());
    dispatch.from_experts(dweights.view({p.slots.dim(0), 1}), received_dweights.view({received_d.dim(0), 1}),
                          p.slots);
  }
}

void Moe::send_rows(Dispatch& dispatch, const Saved& s, const Tensor& x) const {
  dispatch.to_experts(s.received_x, x, s.permutation.tokens);
  const auto column = [](const Tensor& t) { return t.view({t.numel(), 1}); };
  dispatch.to_experts(column(s.received_weights), column(s.weights), s.permutation.slots);
}

Moe::Rows Moe::all_rows(const Saved& s, const Tensor& x) const {
  return {.offsets = s.permutation.offsets,
          .x = x,
          .tokens = s.permutation.tokens,
          .weights = s.weights,
          .slots = s.permutation.slots,
          .gate_up = s.gate_up,
          .inner = s.inner};
}

Moe::Rows Moe::own_rows(const Saved& s, const Dispatch& dispatch, const Tensor& x) const {
  const auto [begin, count] = dispatch.from(ranks_.rank());
  const Dispatch::Part own = dispatch.own();
  return {.offsets = dispatch.offsets(ranks_.rank()),
          .x = x,
          .tokens = s.permutation.tokens.rows(own.begin, count),
          .weights = s.weights,
          .slots = s.permutation.slots.rows(own.begin, count),
          .gate_up = s.gate_up.rows(begin, count),
          .inner = s.inner.rows(begin, count),
          .source = ranks_.rank()};
}

Moe::Rows Moe::received_rows(const Saved& s, const Dispatch& dispatch, int source) const {
  const auto [begin, count] = dispatch.from(source);
  return {.offsets = dispatch.offsets(source),
          .x = s.received_x.rows(begin, count),
          .tokens = {},
          .weights = s.received_weights,
          .slots = dispatch.row_numbers().rows(begin, count),
          .gate_up = s.gate_up.rows(begin, count),
          .inner = s.inner.rows(begin, count),
          .source = source};
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
  shared_gate_->backward(ctx, dshared.view(heads), dy.view(heads), shared_y(s), x, s.shared_gate, dhidden,
                         into);
  shared_->backward(ctx, dx, dshared, x, s.shared);
  add_forward(ctx, dx, dx, dhidden);
}

Flops Moe::flops() const {
  const Flops expert = product_flops(store_, gate_up_proj_) + product_flops(store_, gate_up_proj_ + 1) +
                       product_flops(store_, down_proj_);
  return product_flops(store_, router_) + static_cast<double>(config_.num_experts_per_tok) * expert +
         (shared_ ? shared_->flops() : Flops()) + (shared_gate_ ? shared_gate_->flops() : Flops());
}

Moe::Moe(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t layer,
         const ExpertRanks& experts)
    : config_(config.moe),
      store_(store),
      ranks_(experts),
      layer_(layer),
      hidden_size_(config.hidden_size),
      // Its rows are like those of an output head, one per class, so it is not a matrix for Muon.
      router_(store.add({.name = prefix + ".gate.weight",
                         .shape = {config_.num_experts, hidden_size_},
                         .init = matrix_init(config, config_.num_experts, hidden_size_),
                         .packed = true,
                         .orthogonal = false})),
      router_bias_(config_.bias, store, prefix + ".gate", config_.num_experts) {
  const int64_t C = config.hidden_size, E = config_.num_experts;
  if (E % ranks_.size() != 0)
    fail(ExitCode::usage, "parallel.expert = {} does not divide model.moe.num_experts = {}", ranks_.size(),
         E);
  for (const bool biases : {false, true})
    if (!biases || config_.bias) add_experts(config, prefix, biases);
  if (config_.shared_expert_intermediate_size == 0) return;
  shared_.emplace(config, store, prefix + ".shared_expert", config_.shared_expert_intermediate_size);
  if (!config_.shared_expert_gate) return;
  const GateConfig gate{.position = GatePosition::dense_output, .granularity = GateGranularity::headwise};
  shared_gate_.emplace(config, gate, store, prefix + ".shared_expert_gate", 1, C);
}

void Moe::add_experts(const ModelConfig& config, const std::string& prefix, bool biases) {
  const int64_t C = hidden_size_, F = config_.moe_intermediate_size, E = config_.num_experts;
  const int64_t here = E / ranks_.size(), first = ranks_.rank() * here;
  // A single expert is not a group, and the packed form of a matrix is useless for grouped products.
  ParamSpec spec{.name = "", .shape = {}, .packed = here > 1 && !biases, .groups = here};
  spec.weight_decay = !biases;
  spec.summed_by_products = !biases;
  spec.split.axis = SplitAxis::expert;
  spec.when_frozen = WhenFrozen::skipped;
  spec.mlp_inner = !biases;
  spec.active = static_cast<double>(config_.num_experts_per_tok) / static_cast<double>(E);
  const auto add = [&](int64_t expert, const char* what, int64_t out, int64_t in, const Init& init) {
    spec.name = fmt::format("{}.experts.{}.{}.{}", prefix, expert, what, biases ? "bias" : "weight");
    spec.shape = biases ? std::vector<int64_t>{out} : std::vector<int64_t>{out, in};
    spec.init = biases ? Init::constant(0) : init;
    const ParamStore::Id id = store_.add(spec);
    spec.joined = true;
    return id;
  };
  const Init init = matrix_init(config, F, C);
  for (int64_t e = first; e < first + here; ++e) {
    const ParamStore::Id id = add(e, "gate_proj", F, C, init);
    if (e == first) (biases ? gate_up_bias_.emplace() : gate_up_proj_) = id;
    add(e, "up_proj", F, C, init);
  }
  spec.mlp_inner = spec.joined = false;
  for (int64_t e = first; e < first + here; ++e) {
    const ParamStore::Id id = add(e, "down_proj", C, F, residual_init(config));
    if (e == first) (biases ? down_bias_.emplace() : down_proj_) = id;
  }
}

Moe::Saved Moe::make_saved(Arena& arena, const std::string& name, int64_t T, DType dtype,
                           bool keep_inner) const {
  const int64_t E = config_.num_experts, K = config_.num_experts_per_tok, R = rows_here(T),
                F = config_.moe_intermediate_size;
  const DType wide = accumulate_dtype(dtype);
  keep_inner = keep_inner && !store_.token_rows();  // backward computes it of other tokens
  Saved s;
  s.probabilities = arena.alloc(name + ".probabilities", wide, {T, E});
  s.lse = arena.alloc(name + ".lse", wide, {T});
  s.weights = arena.alloc(name + ".weights", wide, {T, K});
  s.experts = arena.alloc(name + ".experts", DType::i32, {T, K});
  s.counts = arena.alloc(name + ".counts", DType::f64, {E});
  s.permutation = {.offsets = arena.alloc(name + ".offsets", DType::i32, {E + 1}),
                   .slots = arena.alloc(name + ".slots", DType::i32, {T * K}),
                   .tokens = arena.alloc(name + ".tokens", DType::i32, {T * K}),
                   .rows = arena.alloc(name + ".rows", DType::i32, {T, K})};
  if (with_ranks()) s.rank_counts = arena.alloc(name + ".rank_counts", DType::i32, {ranks_.size(), E});
  if (keep_inner) {
    if (with_ranks()) {
      s.received_x = arena.alloc(name + ".received_x", dtype, {R, hidden_size_});
      s.received_weights = arena.alloc(name + ".received_weights", wide, {R});
    }
    s.gate_up = arena.alloc(name + ".gate_up", dtype, {R, 2 * F});
    s.inner = arena.alloc(name + ".inner", dtype, {R, F});
  }
  if (shared_) s.shared = shared_->make_saved(arena, name + ".shared_expert", T, dtype, keep_inner);
  if (shared_gate_) s.shared_gate = shared_gate_->make_saved(arena, name + ".shared_expert_gate", T, dtype);
  s.y = arena.alloc(name + ".y", dtype, {T, hidden_size_});
  return s;
}

Moe::Saved Moe::temporary(ScratchScope& t, const Saved& kept, const Tensor& x) const {
  const int64_t R = rows_here(x.dim(0)), F = config_.moe_intermediate_size;
  Saved s = kept;
  if (with_ranks()) {
    s.received_x = t.alloc("moe.received_x", x.dtype, {R, hidden_size_});
    s.received_weights = t.alloc("moe.received_weights", s.weights.dtype, {R});
  }
  s.gate_up = t.alloc("moe.gate_up", x.dtype, {R, 2 * F});
  s.inner = t.alloc("moe.inner", x.dtype, {R, F});
  return s;
}

int64_t Moe::rows_here(int64_t T) const {
  const int64_t K = config_.num_experts_per_tok;
  return with_ranks() ? ranks_.most_rows(T, K, config_.num_experts) : T * K;
}

}  // namespace sluice
