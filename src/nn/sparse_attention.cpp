#include "nn/sparse_attention.h"

#include <algorithm>
#include <cmath>

#include "ops/elementwise.h"

namespace sluice {
namespace {

/// The mean of min(most, f(t)) over t < seq_len, where f(t) is t / block, rounded down, plus `more`.
double mean_of_smaller(int64_t seq_len, int64_t most, int64_t block, int64_t more) {
  double sum = 0;
  for (int64_t t = 0; t < seq_len; ++t) sum += static_cast<double>(std::min(most, t / block + more));
  return sum / static_cast<double>(seq_len);
}

}  // namespace

SparseAttention::SparseAttention(const ModelConfig& config, ParamStore& store, const std::string& prefix,
                                 int64_t layer, int64_t sequence_ranks)
    : store_(store),
      layer_(layer),
      heads_(config.num_attention_heads),
      head_dim_(config.head_dim),
      sequence_ranks_(sequence_ranks),
      scale_(1.0 / std::sqrt(static_cast<double>(config.head_dim))),
      skip_first_(config.attention.head_balance.skip_first),
      dense_(config.attention.sparse.phase == SparsePhase::dense_warm_up),
      loss_coefficient_(config.attention.sparse.loss.coefficient),
      indexer_(config, store, prefix + ".indexer") {
  if (config.attention.sparse.sink)
    sinks_ = store.add(
        {.name = prefix + ".sinks", .shape = {heads_}, .init = Init::normal(0.02), .weight_decay = false});
}

SparseAttention::Saved SparseAttention::make_saved(Arena& arena, const std::string& name, int64_t num_tokens,
                                                   DType dtype, bool gated) const {
  const DType wide = accumulate_dtype(dtype);
  Saved s;
  s.o = arena.alloc(name + ".o", dtype, {num_tokens, heads_, head_dim_});
  s.lse = arena.alloc(name + ".lse", wide, {heads_, num_tokens});
  s.z0 = arena.alloc(name + ".z0", wide, {heads_, num_tokens});
  if (!gated) s.y = sinks_ ? arena.alloc(name + ".o_sink", dtype, {num_tokens, heads_, head_dim_}) : s.o;
  s.index = indexer_.make_saved(arena, name + ".indexer", num_tokens, dtype);
  const int64_t room =
      selection_room(indexer_.budget().most(), sequence_ranks_ * num_tokens, indexer_.block());
  s.selection.first = arena.alloc(name + ".selected", DType::i32, {indexer_.sets(), num_tokens, room});
  s.selection.count = arena.alloc(name + ".selected_count", DType::i32, {indexer_.sets(), num_tokens});
  s.selection.block = indexer_.block();
  return s;
}

void SparseAttention::forward(Context& ctx, const Heads& heads, const Sequence& sequence,
                              const FusedGate& gate, Saved& s) const {
  if (sequence.zeroing)
    fail(ExitCode::usage, "attention: values of first tokens are zeroed with kinds softmax and sink only");
  indexer_.project(ctx, heads.x, sequence, s.index);
  if (sequence.caches.empty()) return attend(ctx, heads, sequence, gate, s);
  ScratchScope t(ctx.scratch);
  const Tensor lse = t.alloc("attention.lse", s.lse.dtype, {heads_, 1}),
               z0 = t.alloc("attention.z0", s.lse.dtype, {heads_, 1});
  for (int64_t i = 0; i < std::ssize(sequence.caches); ++i) {
    const NextToken token(ctx, heads, sequence, gate, layer_, i);
    Saved out = s;
    for (Tensor* part : {&out.o, &out.y, &out.index.q, &out.index.k, &out.index.w})
      *part = NextToken::row(*part, i);
    out.lse = lse, out.z0 = z0;
    attend(ctx, token.heads, token.sequence, token.gate, out);
  }
}

void SparseAttention::attend(Context& ctx, const Heads& heads, const Sequence& sequence,
                             const FusedGate& gate, const Saved& s) const {
  ScratchScope t(ctx.scratch);
  Indexer::Saved index = s.index;
  indexer_.keep(ctx, sequence, layer_, index);
  const AttentionInputs in = inputs(heads, sequence);
  const AttentionState out = {s.o, s.lse, s.z0};
  if (sequence.dense_warm_up) {
    attention_forward(ctx, out, in);
  } else {
    Selection selection = s.selection;
    if (sequence.cache) {  // as many keys as the cache has tokens
      const int64_t sets = indexer_.sets(), queries = heads.q.dim(0);
      const int64_t room = selection_room(indexer_.budget().most(), heads.k.dim(0), indexer_.block());
      selection.first = t.alloc("attention.selected", DType::i32, {sets, queries, room});
      selection.count = t.alloc("attention.selected_count", DType::i32, {sets, queries});
    }
    const Tensor sums = sequence.indexers ? sequence.indexers->row(layer_) : Tensor();
    indexer_.select(ctx, selection, sequence, index, sums);
    sparse_attention_forward(ctx, out, in, selection);
  }
  const Tensor y = gate ? gate.y : s.y;
  if (sinks_) sink_forward(ctx, y, s.o, s.lse, sinks());
  if (gate) gate_forward(ctx, y, sinks_ ? y : s.o, gate.logits, gate.kind);
}

void SparseAttention::backward(Context& ctx, const AttentionGrads& grads, const Tensor& dy,
                               const Heads& heads, const Sequence& sequence, const FusedGate& gate,
                               const Tensor& dimportance, const Saved& s) const {
  ScratchScope t(ctx.scratch);
  ScoreGrads of_scores;
  const Tensor dsinks = sinks_ ? store_.grad(*sinks_) : Tensor();
  if (dimportance) {
    of_scores.dlse = t.like("attention.dlse", s.lse);
    if (!sinks_) of_scores.coef0 = t.like("attention.coef0", s.lse);
    HeadGate measured = head_gate(s, sequence.first_key);
    measured.targets = sequence.targets;
    head_importance_backward(ctx, of_scores.dlse, of_scores.coef0, dsinks, dimportance, measured);
  }
  Tensor d = dy;
  if (gate) {
    Tensor gated = s.o;
    if (sinks_) {
      gated = t.like("attention.o_sink", s.o);
      sink_forward(ctx, gated, s.o, s.lse, sinks());
    }
    d = t.like("attention.d_o_sink", s.o);
    gate_backward(ctx, d, gate.dlogits, dy, gated, gate.logits, gate.kind, gate.dscores);
  }
  if (sinks_) {
    const Tensor d_o = t.like("attention.d_o_softmax", s.o), dlse = t.like("attention.dlse_sink", s.lse);
    sink_backward(ctx, d_o, dlse, dsinks, d, s.o, s.lse, sinks());
    if (of_scores.dlse) add_forward(ctx, dlse, dlse, of_scores.dlse);
    of_scores.dlse = dlse;
    d = d_o;
  }
  const AttentionInputs in = inputs(heads, sequence);
  if (sequence.dense_warm_up)
    attention_backward(ctx, grads, d, in, {s.o, s.lse}, of_scores);
  else
    sparse_attention_backward(ctx, grads, d, in, {s.o, s.lse}, s.selection, of_scores);
}

void SparseAttention::backward_input(Context& ctx, Tensor dx, Into& into, const Heads& heads,
                                     const Sequence& sequence, const Saved& s) const {
  if (!sequence.indexers || loss_coefficient_ == 0) return;
  const IndexTarget target = {
      .q = heads.q, .k = heads.k, .lse = s.lse, .scale = scale_, .targets = sequence.targets};
  indexer_.backward(ctx, dx, into, heads.x, sequence, target, sequence.dense_warm_up ? nullptr : &s.selection,
                    layer_, s.index);
}

AttentionInputs SparseAttention::inputs(const Heads& heads, const Sequence& sequence) const {
  AttentionInputs in;
  in.q = heads.q, in.k = heads.k, in.v = heads.v;
  in.first_key = sequence.first_key, in.own_key = heads.own_key;
  in.scale = scale_;
  return in;
}

Flops SparseAttention::flops(int64_t seq_len) const {
  const int64_t b = indexer_.block(), base = indexer_.budget().base, all = b == 1;
  const double candidates = mean_of_smaller(seq_len, seq_len, b, all);
  const double selected = dense_ ? candidates : mean_of_smaller(seq_len, base, b, all);
  // Scores and weighted values of all heads; the own block is half seen on average.
  const double own = b == 1 ? 0 : static_cast<double>(b + 1) / 2;
  const double keys = dense_ ? static_cast<double>(seq_len) / 2 : selected * static_cast<double>(b) + own;
  return indexer_.flops(candidates, selected) +
         Flops{.activations = 4.0 * keys * static_cast<double>(heads_ * head_dim_)};
}

HeadGate SparseAttention::head_gate(const Saved& s, const Tensor& first_key) const {
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
