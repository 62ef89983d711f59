#include "nn/indexer.h"

#include <cmath>

#include "core/host_view.h"
#include "nn/init.h"
#include "nn/sequence_ranks.h"
#include "nn/weight_gradient.h"
#include "ops/elementwise.h"
#include "ops/rope.h"

namespace sluice {
namespace {

ParamStore::Id add_matrix(const ModelConfig& config, ParamStore& store, const std::string& name,
                          int64_t out) {
  const int64_t in = config.hidden_size;
  return store.add({.name = name,
                    .shape = {out, in},
                    .init = matrix_init(config, out, in),
                    .packed = true,
                    .when_frozen = WhenFrozen::adapted});
}

Tensor matrix(const Tensor& t) { return t.view({t.dim(0), t.numel() / t.dim(0)}); }

}  // namespace

Indexer::Indexer(const ModelConfig& config, ParamStore& store, const std::string& prefix)
    : config_(config.attention.sparse),
      store_(store),
      sets_(config_.scope == IndexScope::kv_head ? config.num_key_value_heads : 1),
      layers_(config.num_hidden_layers),
      prefix_(prefix) {
  const IndexerConfig& x = config_.indexer;
  q_proj_ = add_matrix(config, store, prefix + ".query_proj.weight", x.heads * x.head_dim);
  k_proj_ = add_matrix(config, store, prefix + ".key_proj.weight", x.head_dim);
  if (x.head_weights != IndexHeadWeights::none)
    w_proj_ = add_matrix(config, store, prefix + ".weights_proj.weight", x.heads);
  const auto add_vector = [&](const char* name, int64_t size, double value) {
    return store.add(
        {.name = prefix + name, .shape = {size}, .init = Init::constant(value), .weight_decay = false});
  };
  if (x.bias) bias_ = add_vector(".bias", x.heads, 0);
  if (x.bias && w_proj_) w_bias_ = add_vector(".weights_proj.bias", x.heads, 0);
  if (x.key_norm)
    k_norm_.emplace(config, store, prefix + ".key_norm.weight", std::vector<int64_t>{x.head_dim});
  if (config_.loss.learn_temperature)
    log_temperature_ = add_vector(".log_temperature", 1, std::log(config_.loss.temperature));
  if (!budget().needs_variance()) return;
  mean_variance_ = store.add({.name = prefix + ".mean_variance",
                              .shape = {1},
                              .init = Init::constant(0),
                              .weight_decay = false,
                              .when_frozen = WhenFrozen::skipped,
                              .statistic = true});
}

Budget Indexer::budget() const {
  const BudgetConfig& k = config_.k;
  return {.policy = k.policy,
          .base = k.base,
          .min = k.min,
          .max = k.max,
          .temperature = k.temperature,
          .force_self = config_.force_self};
}

Indexer::Saved Indexer::make_saved(Arena& arena, const std::string& name, int64_t T, DType dtype) const {
  const IndexerConfig& x = config_.indexer;
  Saved s;
  s.q = arena.alloc(name + ".q", dtype, {T, x.heads, x.head_dim});
  s.k = s.projected = arena.alloc(name + ".k", dtype, {T, x.head_dim});
  if (k_norm_) {
    s.k_norm = k_norm_->make_saved(arena, name + ".k_norm", dtype, {T, x.head_dim});
    s.k = s.k_norm.y;
  }
  s.means = config_.block > 1 ? arena.alloc(name + ".k_means", dtype, {T, x.head_dim}) : s.k;
  if (w_proj_) s.w = arena.alloc(name + ".w", dtype, {T, x.heads});
  return s;
}

void Indexer::project(Context& ctx, const Tensor& x, const Sequence& sequence, Saved& s) const {
  linear_forward(ctx, matrix(s.q), x, store_.linear(q_proj_));
  linear_forward(ctx, s.projected, x, store_.linear(k_proj_));
  if (w_proj_) linear_forward(ctx, s.w, x, store_.linear(*w_proj_));
  const Tensor k = k_norm_ ? s.k_norm.y : s.projected;
  if (k_norm_) k_norm_->forward(ctx, s.projected, s.k_norm);
  if (config_.indexer.rope) {
    const Tensor heads = k.view({k.dim(0), 1, k.dim(1)});
    rope_forward(ctx, s.q, s.q, sequence.positions, sequence.index_cos, sequence.index_sin);
    rope_forward(ctx, heads, heads, sequence.positions, sequence.index_cos, sequence.index_sin);
  }
}

void Indexer::keep(Context& ctx, const Sequence& sequence, int64_t layer, Saved& s) const {
  if (sequence.cache) {
    ScratchScope t(ctx.scratch);
    const Tensor k = sequence.ranks ? sequence.ranks->whole(ctx, t, s.k) : s.k;
    s.k = s.means = sequence.cache->append_index_keys(ctx, layer, k);
  } else if (config_.block > 1 && !sequence.ranks) {
    block_means(ctx, s.means, s.k, sequence.first_key, config_.block);
  }
}

/// Blocks are those of the sequence, which may begin on one rank and end on another.
Indexer::Keys Indexer::keys(Context& ctx, ScratchScope& t, const SequenceRanks* ranks,
                            const Tensor& first_key, const Saved& s) const {
  if (!ranks) return {s.means, first_key};
  const int64_t tokens = ranks->split().ranks * s.k.dim(0);
  const Tensor all = t.alloc("indexer.keys of all ranks", s.k.dtype, {tokens, s.k.dim(1)});
  ranks->finish(ctx, ranks->begin_gather(ctx, all, s.k));
  if (config_.block == 1) return {all, {}};
  const Keys keys = {.means = t.like("indexer.means of all ranks", all),
                     .first_key = t.alloc("indexer.first_key of all ranks", DType::i32, {tokens})};
  ranks->gather_first_keys(ctx, keys.first_key, first_key, ranks->own_key(first_key.dim(0)));
  block_means(ctx, keys.means, all, keys.first_key, config_.block);
  return keys;
}

IndexInputs Indexer::inputs(const Saved& s, const Tensor& keys, const Tensor& first_key,
                            const Tensor& own_key) const {
  const IndexerConfig& x = config_.indexer;
  return {.q = s.q,
          .k = keys,
          .w = s.w,
          .bias = value(bias_),
          .w_bias = value(w_bias_),
          .first_key = first_key,
          .scale = x.scale.value_or(1 / std::sqrt(static_cast<double>(x.head_dim))),
          .sets = sets_,
          .block = config_.block,
          .activation = x.activation,
          .head_weights = x.head_weights,
          .own_key = own_key};
}

void Indexer::select(Context& ctx, const Selection& out, const Sequence& sequence, const Saved& s,
                     const Tensor& sums) const {
  ScratchScope t(ctx.scratch);
  const Keys all = keys(ctx, t, sequence.cache ? nullptr : sequence.ranks, sequence.first_key, s);
  IndexInputs in = inputs(s, all.means, sequence.first_key, sequence.own_key);
  if (sequence.cache && config_.block > 1) {
    in.k = t.like("indexer.means", s.k);
    block_means(ctx, in.k, s.k, sequence.cache->first_key.rows(0, s.k.dim(0)), config_.block);
  }
  select_keys(ctx, out, in, budget(), mean_variance(), sums, prefix_.c_str(),
              sums ? sequence.targets : Tensor());
}

void Indexer::backward(Context& ctx, Tensor dx, Into& into, const Tensor& x, const Sequence& sequence,
                       const IndexTarget& target, const Selection* selection, int64_t layer,
                       const Saved& s) const {
  ScratchScope t(ctx.scratch);
  const Keys all = keys(ctx, t, sequence.ranks, sequence.first_key, s);
  IndexGrads d{.dq = t.like("indexer.dq", s.q), .dk = t.like("indexer.dk", all.means)};
  if (w_proj_) d.dw = t.like("indexer.dw", s.w);
  d.dbias = grad(bias_), d.dw_bias = grad(w_bias_), d.dlog_temperature = grad(log_temperature_);
  const IndexLossConfig& loss = config_.loss;
  index_loss(ctx, d, sequence.indexers->row(layer),
             inputs(s, all.means, sequence.first_key, sequence.own_key), target, selection,
             {.coefficient = loss.coefficient / static_cast<double>(layers_ * sets_),
              .temperature = loss.temperature,
              .log_temperature = value(log_temperature_),
              .gradient_scale = sequence.indexers->gradient_scale});
  if (config_.block > 1) {
    const Tensor dk = t.like("indexer.dk_tokens", d.dk);
    block_means_backward(ctx, dk, d.dk, all.first_key, config_.block);
    d.dk = dk;
  }
  if (sequence.ranks) {
    const Tensor mine = t.like("indexer.dk_own", s.k);
    sequence.ranks->reduce_scatter(ctx, mine, d.dk);
    d.dk = mine;
  }
  if (config_.indexer.rope) {
    const Tensor heads = d.dk.view({d.dk.dim(0), 1, d.dk.dim(1)});
    rope_backward(ctx, d.dq, d.dq, sequence.positions, sequence.index_cos, sequence.index_sin);
    rope_backward(ctx, heads, heads, sequence.positions, sequence.index_cos, sequence.index_sin);
  }
  if (k_norm_) k_norm_->backward(ctx, d.dk, d.dk, s.projected, s.k_norm);
  const auto project_backward = [&](const Tensor& dy, ParamStore::Id weight) {
    weight_backward(ctx, store_, weight, dy, x);
    if (config_.indexer.detach_input) return;
    linear_backward_input(ctx, dx, dy, store_.linear(weight), into);
    into = Into::add;
  };
  project_backward(matrix(d.dq), q_proj_);
  project_backward(d.dk, k_proj_);
  if (w_proj_) project_backward(d.dw, *w_proj_);
}

double Indexer::temperature(Context& ctx) const {
  if (!log_temperature_) return config_.loss.temperature;
  const HostView view(ctx, store_.value(*log_temperature_));
  const Tensor& t = view.tensor();
  return std::exp(t.dtype == DType::f64    ? t.as<double>()[0]
                  : t.dtype == DType::bf16 ? static_cast<double>(float(t.as<bf16>()[0]))
                                           : static_cast<double>(t.as<float>()[0]));
}

Flops Indexer::flops(double candidates, double selected) const {
  const IndexerConfig& x = config_.indexer;
  Flops projections = product_flops(store_, q_proj_) + product_flops(store_, k_proj_);
  if (w_proj_) projections += product_flops(store_, *w_proj_);
  const double pair = 2.0 * static_cast<double>(x.heads * x.head_dim);
  // Without a loss nothing of it is differentiated.
  if (config_.loss.coefficient == 0) return {.forward_only = projections.forward() + pair * candidates};
  // A detached input has no gradient: backward takes that of trained weights alone.
  if (x.detach_input) projections = {.frozen = projections.trained, .forward_only = projections.frozen};
  return projections + Flops{.activations = pair * selected, .forward_only = pair * (candidates - selected)};
}

}  // namespace sluice
