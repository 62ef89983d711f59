#include "nn/softmax_attention.h"

#include <cmath>

#include "ops/value_zeroing.h"

namespace sluice {

SoftmaxAttention::SoftmaxAttention(const ModelConfig& config, ParamStore& store, const std::string& prefix)
    : store_(store),
      heads_(config.num_attention_heads),
      head_dim_(config.head_dim),
      scale_(1.0 / std::sqrt(static_cast<double>(config.head_dim))),
      kernel_(config.attention.kernel),
      skip_first_(config.attention.head_balance.skip_first) {
  if (config.attention.kind == AttentionKind::sink)
    sinks_ = store.add(
        {.name = prefix + ".sinks", .shape = {heads_}, .init = Init::normal(0.02), .weight_decay = false});
}

SoftmaxAttention::Saved SoftmaxAttention::make_saved(Arena& arena, const std::string& name,
                                                     int64_t num_tokens, DType dtype, bool gated) const {
  const DType wide = accumulate_dtype(dtype);
  Saved s;
  s.o = arena.alloc(name + ".o", dtype, {num_tokens, heads_, head_dim_});
  s.lse = arena.alloc(name + ".lse", wide, {heads_, num_tokens});
  s.z0 = arena.alloc(name + ".z0", wide, {heads_, num_tokens});
  if (!gated) s.y = sinks_ ? arena.alloc(name + ".o_sink", dtype, {num_tokens, heads_, head_dim_}) : s.o;
  return s;
}

void SoftmaxAttention::forward(Context& ctx, const Heads& heads, const Sequence& sequence,
                               const FusedGate& gate, Saved& s) const {
  const Tensor y = gate ? gate.y : s.y;
  if (!sequence.zeroing) return attend(ctx, heads, sequence, gate, y, s.o, s);

  SLUICE_CHECK(!sequence.cache,
               "attention: values of first tokens are zeroed without a cache of keys and values only");
  ScratchScope t(ctx.scratch);
  const Heads zeroed = {heads.q, heads.k, t.like("attention.zeroed", heads.v)};
  zero_first_values(ctx, zeroed.v, heads.v, sequence.first_key);
  if (!sequence.zeroing->sinks_above) return attend(ctx, zeroed, sequence, gate, y, s.o, s);
  // Heads share values, so each head selects its output from one of two attentions.
  const bool apart = sinks_ || gate;  // y is not o
  const Tensor other_o = t.like("attention.other_o", s.o),
               other_y = apart ? t.like("attention.other_y", s.o) : other_o;
  attend(ctx, zeroed, sequence, gate, other_y, other_o, s);
  attend(ctx, heads, sequence, gate, y, s.o, s);
  take_sink_heads(ctx, s.o, other_o, s.lse, s.z0, sinks(), *sequence.zeroing->sinks_above);
  if (apart) take_sink_heads(ctx, y, other_y, s.lse, s.z0, sinks(), *sequence.zeroing->sinks_above);
}

void SoftmaxAttention::attend(Context& ctx, const Heads& heads, const Sequence& sequence,
                              const FusedGate& gate, const Tensor& y, const Tensor& o, Saved& s) const {
  const AttentionState out = {o, s.lse, s.z0};
  if (sinks_ || gate)
    gated_attention_forward(ctx, y, out, inputs(heads, sequence), output(gate), kernel_);
  else
    attention_forward(ctx, out, inputs(heads, sequence), kernel_);
}

void SoftmaxAttention::backward(Context& ctx, const AttentionGrads& grads, const Tensor& dy,
                                const Heads& heads, const Sequence& sequence, const FusedGate& gate,
                                const Tensor& dimportance, const Saved& s) const {
  ScratchScope t(ctx.scratch);
  const Tensor dsinks = sinks_ ? store_.grad(*sinks_) : Tensor();
  ScoreGrads of_scores;
  if (dimportance) {
    of_scores.dlse = t.like("attention.dlse", s.lse);
    if (!sinks_) of_scores.coef0 = t.like("attention.coef0", s.lse);
    head_importance_backward(ctx, of_scores.dlse, of_scores.coef0, dsinks, dimportance,
                             head_gate(s, sequence.first_key));
  }
  const AttentionInputs in = inputs(heads, sequence);
  const AttentionState state = {s.o, s.lse};
  if (sinks_ || gate)
    gated_attention_backward(ctx, {grads.dq, grads.dk, grads.dv, gate.dlogits, dsinks}, dy, in, state,
                             output(gate), of_scores, kernel_);
  else
    attention_backward(ctx, grads, dy, in, state, of_scores, kernel_);
}

AttentionInputs SoftmaxAttention::inputs(const Heads& heads, const Sequence& sequence) const {
  return {heads.q, heads.k, heads.v, sequence.first_key, scale_};
}

AttentionOutput SoftmaxAttention::output(const FusedGate& gate) const {
  return {.sink = sinks(), .gate = gate.logits, .kind = gate.kind, .dhead = gate.dscores};
}

HeadGate SoftmaxAttention::head_gate(const Saved& s, const Tensor& first_key) const {
  HeadGate g;
  g.lse = s.lse;
  g.skip_first = skip_first_;
  if (sinks_) {
    g.sink = sinks();
  } else {
    g.z0 = s.z0;
    g.first_key = first_key;
  }
  return g;
}

}  // namespace sluice
