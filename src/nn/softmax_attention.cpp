#include "nn/softmax_attention.h"

#include <algorithm>
#include <cmath>

#include "ops/elementwise.h"
#include "ops/value_zeroing.h"
#include "ops/window.h"

namespace sluice {
namespace {

/// A row of a key or a value for each of `rows` heads. It is no linear map: Muon does not update it.
ParamStore::Id add_rows(ParamStore& store, const std::string& name, int64_t rows, int64_t depth) {
  return store.add({.name = name,
                    .shape = {rows, depth},
                    .init = Init::normal(0.02),
                    .weight_decay = false,
                    .orthogonal = false});
}

}  // namespace

SoftmaxAttention::SoftmaxAttention(const ModelConfig& config, ParamStore& store, const std::string& prefix,
                                   int64_t layer)
    : store_(store),
      kind_(config.attention.kind),
      layer_(layer),
      heads_(config.num_attention_heads),
      head_dim_(config.head_dim),
      window_(config.attention.window_in_layer(layer)),
      scale_(1.0 / std::sqrt(static_cast<double>(config.head_dim))),
      kernel_(config.attention.kernel),
      skip_first_(config.attention.head_balance.skip_first) {
  if (kind_ == AttentionKind::sink)
    sinks_ = store.add(
        {.name = prefix + ".sinks", .shape = {heads_}, .init = Init::normal(0.02), .weight_decay = false});
  if (kind_ == AttentionKind::sink_key) extra_key_ = add_rows(store, prefix + ".sink_key", heads_, head_dim_);
  if (kind_ != AttentionKind::kv_bias) return;
  extra_key_ = add_rows(store, prefix + ".bias_key", config.num_key_value_heads, head_dim_);
  extra_value_ = add_rows(store, prefix + ".bias_value", config.num_key_value_heads, head_dim_);
}

SoftmaxAttention::Saved SoftmaxAttention::make_saved(Arena& arena, const std::string& name,
                                                     int64_t num_tokens, DType dtype, bool gated) const {
  const DType wide = accumulate_dtype(dtype);
  Saved s;
  s.o = arena.alloc(name + ".o", dtype, {num_tokens, heads_, head_dim_});
  s.lse = arena.alloc(name + ".lse", wide, {heads_, num_tokens});
  s.z0 = arena.alloc(name + ".z0", wide, {heads_, num_tokens});
  if (!gated) s.y = joined() ? arena.alloc(name + ".o_sink", dtype, {num_tokens, heads_, head_dim_}) : s.o;
  if (window_ > 0) s.first_key = arena.alloc(name + ".first_key", DType::i32, {num_tokens});
  if (constant_sink()) s.sink = arena.alloc(name + ".sink", dtype, {heads_});
  if (extra_key_) s.extra = arena.alloc(name + ".extra", wide, {heads_, num_tokens});
  return s;
}

void SoftmaxAttention::forward(Context& ctx, const Heads& heads, const Sequence& sequence,
                               const FusedGate& gate, Saved& s) const {
  if (!sequence.caches.empty()) return forward_each(ctx, heads, sequence, gate, s);
  const Tensor y = gate ? gate.y : s.y;
  if (constant_sink()) fill(ctx, s.sink, 0);
  // With keys of other ranks, first_key is relative to the query, as if there were none.
  const int64_t keys = (heads.own_key ? heads.q : heads.k).dim(0);
  if (window_ > 0) window_first_key(ctx, s.first_key, sequence.first_key, keys, window_);
  const Tensor& first_key = window_ > 0 ? s.first_key : sequence.first_key;
  if (sequence.zeroing)
    zero_and_attend(ctx, heads, sequence, first_key, gate, y, s);
  else
    attend(ctx, heads, first_key, gate, y, s.o, s);
  if (window_ > 0) hide_first_logits(ctx, s.z0, sequence.first_key, first_key);
}

/// Row i is the next token of the sequence whose earlier keys and values are in caches[i].
void SoftmaxAttention::forward_each(Context& ctx, const Heads& heads, const Sequence& sequence,
                                    const FusedGate& gate, const Saved& s) const {
  ScratchScope t(ctx.scratch);
  const Tensor lse = t.alloc("attention.lse", s.lse.dtype, {heads_, 1}),
               z0 = t.alloc("attention.z0", s.lse.dtype, {heads_, 1}),
               extra = s.extra ? t.alloc("attention.extra", s.lse.dtype, {heads_, 1}) : Tensor();
  for (int64_t i = 0; i < std::ssize(sequence.caches); ++i) {
    const NextToken token(ctx, heads, sequence, gate, layer_, i);
    Saved out = s;
    for (Tensor* part : {&out.o, &out.y, &out.first_key}) *part = NextToken::row(*part, i);
    out.lse = lse, out.z0 = z0, out.extra = extra;
    forward(ctx, token.heads, token.sequence, token.gate, out);
  }
}

void SoftmaxAttention::zero_and_attend(Context& ctx, const Heads& heads, const Sequence& sequence,
                                       const Tensor& first_key, const FusedGate& gate, const Tensor& y,
                                       Saved& s) const {
  SLUICE_CHECK(!sequence.cache && !heads.own_key,
               "attention: values of first tokens are zeroed without a cache of keys and values only, and on "
               "one rank");
  ScratchScope t(ctx.scratch);
  const Heads zeroed = {heads.q, heads.k, t.like("attention.zeroed", heads.v)};
  zero_first_values(ctx, zeroed.v, heads.v, sequence.first_key);
  if (!sequence.zeroing->sinks_above) return attend(ctx, zeroed, first_key, gate, y, s.o, s);
  // Heads share values, so each head selects its output from one of two attentions.
  const bool apart = joined() || gate;  // y is not o
  const Tensor other_o = t.like("attention.other_o", s.o),
               other_y = apart ? t.like("attention.other_y", s.o) : other_o;
  attend(ctx, zeroed, first_key, gate, other_y, other_o, s);
  attend(ctx, heads, first_key, gate, y, s.o, s);
  if (window_ > 0) hide_first_logits(ctx, s.z0, sequence.first_key, first_key);
  const double threshold = *sequence.zeroing->sinks_above;
  const auto take = [&](const Tensor& output, const Tensor& other) {
    take_sink_heads(ctx, output, other, s.lse, s.z0, sink_logits(s), sequence.first_key, sequence.targets,
                    threshold);
  };
  take(s.o, other_o);
  if (apart) take(y, other_y);
}

void SoftmaxAttention::attend(Context& ctx, const Heads& heads, const Tensor& first_key,
                              const FusedGate& gate, const Tensor& y, const Tensor& o, Saved& s) const {
  const AttentionState out = {o, s.lse, s.z0};
  if (joined() || gate)
    gated_attention_forward(ctx, y, out, inputs(heads, first_key), output(gate, s), kernel_);
  else
    attention_forward(ctx, out, inputs(heads, first_key), kernel_);
}

void SoftmaxAttention::backward(Context& ctx, const AttentionGrads& grads, const Tensor& dy,
                                const Heads& heads, const Sequence& sequence, const FusedGate& gate,
                                const Tensor& dimportance, const Saved& s) const {
  ScratchScope t(ctx.scratch);
  Tensor dsinks = grad(sinks_);
  if (constant_sink()) {  // computed, and not wanted
    dsinks = t.alloc("attention.dsinks", s.lse.dtype, {heads_});
    fill(ctx, dsinks, 0);
  }
  ScoreGrads of_scores;
  if (dimportance) {
    of_scores.dlse = t.like("attention.dlse", s.lse);
    if (!joined()) of_scores.coef0 = t.like("attention.coef0", s.lse);
    HeadGate measured = head_gate(s, sequence.first_key);
    measured.targets = sequence.targets;
    head_importance_backward(ctx, of_scores.dlse, of_scores.coef0, dsinks, dimportance, measured);
  }
  const AttentionInputs in = inputs(heads, window_ > 0 ? s.first_key : sequence.first_key);
  const AttentionState state = {s.o, s.lse};
  if (joined() || gate)
    gated_attention_backward(ctx,
                             {grads.dq, grads.dk, grads.dv, gate.dlogits, dsinks, grad(extra_key_),
                              grad(extra_value_), grads.queries},
                             dy, in, state, output(gate, s), of_scores, kernel_);
  else
    attention_backward(ctx, grads, dy, in, state, of_scores, kernel_);
}

AttentionInputs SoftmaxAttention::inputs(const Heads& heads, const Tensor& first_key) const {
  const auto weights =
      kind_ == AttentionKind::softpick ? AttentionWeights::softpick : AttentionWeights::softmax;
  return {heads.q, heads.k, heads.v, first_key, scale_, weights, heads.own_key};
}

AttentionOutput SoftmaxAttention::output(const FusedGate& gate, const Saved& s) const {
  AttentionOutput out = {.gate = gate.logits, .kind = gate.kind, .dhead = gate.dscores};
  if (extra_key_)
    out.extra = {store_.value(*extra_key_), sink_value(), s.extra};
  else
    out.sink = sink_logits(s);
  return out;
}

HeadGate SoftmaxAttention::head_gate(const Saved& s, const Tensor& first_key) const {
  HeadGate g;
  g.lse = s.lse;
  g.skip_first = skip_first_;
  if (joined()) {
    g.sink = sink_logits(s);
  } else {
    g.z0 = s.z0;
    g.first_key = first_key;
  }
  return g;
}

double SoftmaxAttention::weight(double logit, double lse) const {
  const double e = std::exp(logit - lse);
  return kind_ == AttentionKind::softpick ? std::max(e - std::exp(-lse), 0.0) : e;
}

Flops SoftmaxAttention::flops(int64_t seq_len) const {
  const auto length = static_cast<double>(seq_len),
             seen = window_ > 0 && window_ < seq_len ? static_cast<double>(window_) : length;
  const auto width = static_cast<double>(heads_ * head_dim_);
  Flops f = {.activations = 4.0 * width * seen * (1 - seen / (2 * length))};
  for (const auto& id : {extra_key_, extra_value_})
    if (id) (store_.trains(*id) ? f.trained : f.frozen) += 2.0 * width;
  return f;
}

}  // namespace sluice
