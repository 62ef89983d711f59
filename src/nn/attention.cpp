#include "nn/attention.h"

#include <algorithm>
#include <utility>

#include "nn/init.h"
#include "nn/sequence_ranks.h"
#include "nn/weight_gradient.h"
#include "ops/elementwise.h"
#include "ops/linear.h"
#include "ops/padding.h"

namespace sluice {
namespace {

using P = GatePosition;

/// The gated tensor of each position.
ByPosition<GateSite> gate_sites(const ModelConfig& config) {
  const int64_t C = config.hidden_size, H = config.num_attention_heads, Hkv = config.num_key_value_heads,
                D = config.head_dim;
  ByPosition<GateSite> sites;
  sites[P::query] = {"query_", H, D};
  sites[P::key] = {"key_", Hkv, D};
  sites[P::value] = {"value_", Hkv, D};
  sites[P::sdpa_output] = {"", H, D};  // the paper's main position
  sites[P::dense_output] = {"dense_", 1, C, /*joined=*/true};
  return sites;
}

ParamSpec projection(const std::string& name, int64_t out, int64_t in, const Init& init) {
  return {.name = name + ".weight",
          .shape = {out, in},
          .init = init,
          .packed = true,
          .when_frozen = WhenFrozen::adapted,
          .summed_by_products = true};
}

/// Of the hidden state: one of InputProjections.
ParamStore::Id add_input_projection(const ModelConfig& config, ParamStore& store, const std::string& name,
                                    int64_t out, bool first) {
  const int64_t C = config.hidden_size;
  ParamSpec spec = projection(name, out, C, matrix_init(config, out, C));
  spec.joined = !first;
  spec.joined_in_backward = true;
  return store.add(std::move(spec));
}

/// Whether no stage lies between the core and the gate at sdpa_output.
bool gate_follows_core(const ModelConfig& config) {
  const AttentionConfig& attention = config.attention;
  return attention.exclusive == ExclusiveAttention::none && attention.output_norm == OutputNorm::none &&
         attention.output_activation == OutputActivation::none;
}

/// Whether the logits of the first gate are a product of the layer's input whose gradient the core leaves,
/// without a bias between the two.
bool gate_is_input_projection(const ModelConfig& config) {
  const AttentionConfig& attention = config.attention;
  if (attention.gates.empty() || !gate_follows_core(config)) return false;
  const auto at_output = [](const GateConfig& gate) { return gate.position == P::sdpa_output; };
  const GateConfig& gate = attention.gates.front();
  return at_output(gate) && gate.input == GateInput::hidden && !gate.bias &&
         (gate.input_channels == 0 || gate.input_channels == config.hidden_size) &&
         std::count_if(attention.gates.begin(), attention.gates.end(), at_output) == 1;
}

Attention::Core make_core(const ModelConfig& config, ParamStore& store, const std::string& prefix,
                          int64_t layer, int64_t sequence_ranks) {
  if (config.attention.kind == AttentionKind::sparse)
    return Attention::Core(std::in_place_type<SparseAttention>, config, store, prefix, layer, sequence_ranks);
  return Attention::Core(std::in_place_type<SoftmaxAttention>, config, store, prefix, layer);
}

Tensor matrix(const Tensor& t) { return t.view({t.dim(0), t.numel() / t.dim(0)}); }

}  // namespace

Attention::Attention(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t layer,
                     int64_t sequence_ranks)
    : store_(store),
      layer_(layer),
      heads_(config.num_attention_heads),
      head_dim_(config.head_dim),
      hidden_size_(config.hidden_size),
      q_proj_(add_input_projection(config, store, prefix + ".q_proj", heads_ * head_dim_, /*first=*/true)),
      k_proj_(add_input_projection(config, store, prefix + ".k_proj",
                                   SwitchHeads::rows(config, SwitchHeads::Of::keys), false)),
      v_proj_(add_input_projection(config, store, prefix + ".v_proj",
                                   SwitchHeads::rows(config, SwitchHeads::Of::values), false)),
      // At the position of the gates that they equal with one expert.
      k_switch_(config, store, prefix + ".k_switch.weight", SwitchHeads::Of::keys),
      v_switch_(config, store, prefix + ".v_switch.weight", SwitchHeads::Of::values),
      gates_(config, store, prefix, gate_sites(config), gate_is_input_projection(config)),
      o_proj_(
          store.add(projection(prefix + ".o_proj", hidden_size_, heads_ * head_dim_, residual_init(config)))),
      q_bias_(config.attention_bias, store, prefix + ".q_proj", store.spec(q_proj_).shape[0]),
      k_bias_(config.attention_bias, store, prefix + ".k_proj", store.spec(k_proj_).shape[0]),
      v_bias_(config.attention_bias, store, prefix + ".v_proj", store.spec(v_proj_).shape[0]),
      o_bias_(config.attention_bias, store, prefix + ".o_proj", hidden_size_),
      q_position_(config, store, prefix + ".q_norm.weight"),
      k_position_(config, store, prefix + ".k_norm.weight"),
      core_(make_core(config, store, prefix, layer, sequence_ranks)),
      exclusive_(config, store, prefix + ".exclusive_scale"),
      output_(config, store, prefix + ".o_norm.weight"),
      inputs_(store),
      gate_is_input_(gate_is_input_projection(config)) {
  const int64_t kv_heads = config.num_key_value_heads;
  SLUICE_CHECK(kv_heads > 0 && heads_ % kv_heads == 0, "attention: {} heads over {} key/value heads", heads_,
               kv_heads);
  SLUICE_CHECK(head_dim_ % 2 == 0, "attention: head_dim must be even, got {}", head_dim_);
  if (gate_follows_core(config)) gates_.fuse(P::sdpa_output);
  for (const ParamStore::Id id : {q_proj_, k_proj_, v_proj_}) inputs_.add(id);
  if (gate_is_input_) inputs_.add(gates_.gate(0).weight());
}

Flops Attention::flops(int64_t seq_len) const {
  Flops sum = k_switch_.flops() + v_switch_.flops();
  sum += std::visit([&](const auto& core) { return core.flops(seq_len); }, core_);
  for (const ParamStore::Id id : {q_proj_, k_proj_, v_proj_, o_proj_}) sum += product_flops(store_, id);
  for (size_t i = 0; i < gates_.size(); ++i) sum += gates_.gate(i).flops();
  return sum;
}

Attention::Saved Attention::make_saved(Arena& arena, const std::string& name, int64_t T, DType dtype) const {
  Saved s;
  const auto make_gates = [&](GatePosition position, const Tensor& x) {
    s.gates[position] = gates_[position].make_saved(arena, name, x, T, dtype);
    return s.gates[position].y;
  };
  s.q = arena.alloc(name + ".q", dtype, {T, heads_, head_dim_});
  s.k = k_switch_.make_saved(arena, name + ".k", T, dtype);
  s.v = v_switch_.make_saved(arena, name + ".v", T, dtype);
  s.q_position = q_position_.make_saved(arena, name + ".q_norm", make_gates(P::query, s.q));
  s.k_position = k_position_.make_saved(arena, name + ".k_norm", make_gates(P::key, s.k.y));
  make_gates(P::value, s.v.y);
  const bool fused = gates_[P::sdpa_output].fused();
  s.core = std::visit(
      [&](const auto& core) { return SparseAttention::Saved{core.make_saved(arena, name, T, dtype, fused)}; },
      core_);
  s.exclusive = exclusive_.make_saved(arena, name + ".o_exclusive", s.core.y);
  s.output = output_.make_saved(arena, name + ".o", s.exclusive.y);
  make_gates(P::sdpa_output, s.output.y);
  s.dense = arena.alloc(name + ".dense", dtype, {T, hidden_size_});
  s.y = matrix(make_gates(P::dense_output, s.dense));
  return s;
}

namespace {

/// Begins to gather the keys, or values, of all ranks that share the sequence; otherwise none.
SequenceRanks::Gather gather_rows(Context& ctx, ScratchScope& t, const Sequence& sequence,
                                  const Tensor& mine) {
  if (!sequence.ranks) return {};
  SLUICE_CHECK(sequence.caches.empty(), "attention: ranks share no sequences of one token each");
  return sequence.ranks->begin_gather(ctx, sequence.ranks->room(t, mine), mine);
}

}  // namespace

Attention::Gathered Attention::begin_gather(Context& ctx, ScratchScope& t, const Sequence& sequence,
                                            const Saved& s) const {
  return {gather_rows(ctx, t, sequence, s.k_position.y), gather_rows(ctx, t, sequence, s.gates[P::value].y)};
}

/// The inputs of the core, without the earlier keys and values of a KV cache.
Heads Attention::heads_of(Context& ctx, const Gathered& g, const Tensor& x, const Sequence& sequence,
                          const Saved& s) const {
  const Tensor& q = s.q_position.y;
  if (!sequence.ranks) return {q, s.k_position.y, s.gates[P::value].y, x};
  return {q, sequence.ranks->finish(ctx, g.k), sequence.ranks->finish(ctx, g.v), x, sequence.own_key};
}

void Attention::forward(Context& ctx, const Tensor& x, const Sequence& sequence, Saved& s) const {
  // Keys first, then values: where ranks share the sequence, they travel while the others are computed.
  ScratchScope t(ctx.scratch);
  Gathered gathered;
  project(ctx, matrix(s.k.projected), x, k_proj_, k_bias_);
  k_switch_.forward(ctx, x, s.k);
  gates_[P::key].forward(ctx, s.k.y, x, s.gates[P::key]);
  k_position_.forward(ctx, s.gates[P::key].y, sequence, s.k_position);
  gathered.k = gather_rows(ctx, t, sequence, s.k_position.y);

  project(ctx, matrix(s.v.projected), x, v_proj_, v_bias_);
  v_switch_.forward(ctx, x, s.v);
  gates_[P::value].forward(ctx, s.v.y, x, s.gates[P::value]);
  gathered.v = gather_rows(ctx, t, sequence, s.gates[P::value].y);

  project(ctx, matrix(s.q), x, q_proj_, q_bias_);
  gates_[P::query].forward(ctx, s.q, x, s.gates[P::query]);
  q_position_.forward(ctx, s.gates[P::query].y, sequence, s.q_position);
  const FusedGate fused = gates_[P::sdpa_output].fused_forward(ctx, x, s.gates[P::sdpa_output]);

  Heads heads = heads_of(ctx, gathered, x, sequence, s);
  if (sequence.cache) sequence.cache->append(ctx, layer_, heads.k, heads.v);
  std::visit([&](const auto& core) { core.forward(ctx, heads, sequence, fused, s.core); }, core_);
  exclusive_.forward(ctx, s.core.y, s.gates[P::value].y, s.exclusive);
  output_.forward(ctx, s.exclusive.y, s.output);
  gates_[P::sdpa_output].forward(ctx, s.output.y, x, s.gates[P::sdpa_output]);
  if (sequence.heads) count_heads(ctx, sequence, s);

  project(ctx, s.dense, matrix(s.gates[P::sdpa_output].y), o_proj_, o_bias_);
  gates_[P::dense_output].forward(ctx, s.dense, x, s.gates[P::dense_output]);
}

void Attention::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Sequence& sequence,
                         const Saved& s) const {
  ScratchScope t(ctx.scratch);
  backward(ctx, dx, dy, x, sequence, begin_gather(ctx, t, sequence, s), s);
}

void Attention::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Sequence& sequence,
                         const Gathered& gathered, const Saved& s) const {
  SLUICE_CHECK(!sequence.cache && sequence.caches.empty(),
               "attention: no backward through a cache of keys and values");
  ScratchScope t(ctx.scratch);
  Into into = Into::overwrite;  // x has several consumers: the first overwrites dx, the others add

  const Tensor ddense = gates_[P::dense_output].empty() ? dy : t.like("attention.ddense", s.dense);
  gates_[P::dense_output].backward(ctx, ddense, dy, s.dense, x, s.gates[P::dense_output], dx, into);
  const Tensor d_o = t.like("attention.d_o", s.core.o), gated_o = matrix(s.gates[P::sdpa_output].y);
  linear_backward_input(ctx, matrix(d_o), ddense, store_.linear(o_proj_), Into::overwrite);

  // A head's importance is measured by the first gate if there is one, otherwise by the core.
  const Tensor dimportance = sequence.heads ? sequence.heads->gradient(layer_) : Tensor();
  const bool gated = !gates_[P::sdpa_output].empty();
  gates_[P::sdpa_output].backward(ctx, d_o, d_o, s.output.y, x, s.gates[P::sdpa_output], dx, into,
                                  dimportance, sequence.targets);
  output_.backward(ctx, d_o, d_o, s.exclusive.y, s.output);
  const Tensor dv_own = exclusive_.identity() ? Tensor() : t.like("attention.dv_own", s.v.y);
  exclusive_.backward(ctx, d_o, dv_own, d_o, s.core.y, s.gates[P::value].y);

  // The gradient of a projection is left in its columns by the last op before it, where that can; otherwise
  // it is copied there.
  const InputProjections::Gradients projected = inputs_.make_gradients(t, x.dim(0), x.dtype);
  const auto columns = [&](ParamStore::Id id, const Tensor& like) {
    const Tensor c = inputs_.gradient(projected, id);
    return like.rank == 3 ? c.view({like.dim(0), like.dim(1), like.dim(2)}) : c;
  };
  const bool alone = !sequence.ranks, by_softmax = alone && softmax();
  const bool q_in_place = alone && gates_[P::query].empty() && !q_bias_,
             k_in_place = alone && gates_[P::key].empty() && k_switch_.identity() && !k_bias_,
             v_in_place =
                 by_softmax && gates_[P::value].empty() && v_switch_.identity() && !dv_own && !v_bias_,
             gate_in_place = by_softmax && gate_is_input_;
  const Tensor dq = t.like("attention.dq", s.q), dk = t.like("attention.dk", s.k.y),
               dv = v_in_place ? columns(v_proj_, s.v.y) : t.like("attention.dv", s.v.y);
  FusedGate fused = gates_[P::sdpa_output].fused_gate(s.gates[P::sdpa_output]);
  if (fused) {
    fused.dlogits = gate_in_place ? columns(gates_.gate(0).weight(), fused.logits)
                                  : t.like("attention.dgate", fused.logits);
    fused.dscores = dimportance;
  }
  const Tensor measured = gated ? Tensor() : dimportance;
  const Heads heads = heads_of(ctx, gathered, x, sequence, s);
  const auto core_backward = [&](const AttentionGrads& grads) {
    const auto of_kind = [&](const auto& core) {
      core.backward(ctx, grads, d_o, heads, sequence, fused, measured, s.core);
      core.backward_input(ctx, dx, into, heads, sequence, s.core);
    };
    std::visit(of_kind, core_);
  };
  // Through the rotation and the norm of queries the core goes on by itself, unless it computes those of
  // other ranks, too.
  const Tensor dq_before = q_in_place ? columns(q_proj_, s.q) : dq;
  const auto before = sequence.whole
                          ? std::optional<PositionBackward>()
                          : q_position_.arguments(dq_before, s.gates[P::query].y, sequence, s.q_position);
  const SequenceRanks* const ranks = sequence.whole ? nullptr : sequence.ranks;
  SequenceRanks::Scatter sent_k, sent_v;
  if (sequence.whole) {
    whole_core_backward(ctx, {dq, dk, dv}, d_o, heads, sequence, fused, measured, dx, into);
  } else if (ranks) {  // the gradients that this rank's queries have for the keys of all
    const Tensor all_dk = t.like("attention.dk of all ranks", heads.k),
                 all_dv = t.like("attention.dv of all ranks", heads.v);
    core_backward({.dq = dq, .dk = all_dk, .dv = all_dv, .queries = before});
    // The keys and values of all ranks are no longer needed: what arrives overwrites them.
    sent_k = ranks->begin_scatter(ctx, heads.k, all_dk);
    sent_v = ranks->begin_scatter(ctx, heads.v, all_dv);
  } else {
    core_backward({.dq = dq, .dk = dk, .dv = dv, .queries = before});
  }
  if (fused.dscores && sequence.targets) clear_padding(ctx, fused.dlogits, sequence.targets);
  const auto copy = [&](ParamStore::Id id, const Tensor& gradient, const Bias& bias) {
    bias.backward(ctx, matrix(gradient));
    inputs_.put(ctx, projected, id, gradient);
  };
  if (!gate_is_input_)
    gates_[P::sdpa_output].fused_backward(ctx, fused.dlogits, x, dx, into);
  else if (!gate_in_place)
    inputs_.put(ctx, projected, gates_.gate(0).weight(), fused.dlogits);

  // First what waits for no gradients of keys and values: they travel meanwhile.
  weight_backward(ctx, store_, o_proj_, ddense, gated_o);
  o_bias_.backward(ctx, ddense);
  if (!before) q_position_.backward(ctx, dq_before, dq, s.gates[P::query].y, sequence, s.q_position);
  gates_[P::query].backward(ctx, dq, dq, s.q, x, s.gates[P::query], dx, into);
  if (!q_in_place) copy(q_proj_, dq, q_bias_);
  if (ranks) ranks->finish(ctx, dk, sent_k);
  k_position_.backward(ctx, k_in_place ? columns(k_proj_, s.k.y) : dk, dk, s.gates[P::key].y, sequence,
                       s.k_position);
  gates_[P::key].backward(ctx, dk, dk, s.k.y, x, s.gates[P::key], dx, into);
  const Tensor dk_projected = k_switch_.identity() ? dk : t.like("attention.dk_experts", s.k.projected);
  k_switch_.backward(ctx, dk_projected, dk, x, s.k, dx, into);
  if (!k_in_place) copy(k_proj_, dk_projected, k_bias_);
  if (ranks) ranks->finish(ctx, dv, sent_v);
  if (dv_own) add_forward(ctx, dv, dv, dv_own);
  gates_[P::value].backward(ctx, dv, dv, s.v.y, x, s.gates[P::value], dx, into);
  const Tensor dv_projected = v_switch_.identity() ? dv : t.like("attention.dv_experts", s.v.projected);
  v_switch_.backward(ctx, dv_projected, dv, x, s.v, dx, into);
  if (!v_in_place) copy(v_proj_, dv_projected, v_bias_);
  inputs_.backward(ctx, dx, projected, x, into);
}

void Attention::whole_core_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o,
                                    const Heads& mine, const Sequence& sequence, const FusedGate& gate,
                                    const Tensor& dimportance, const Tensor& dx, Into& into) const {
  const SequenceRanks& ranks = *sequence.ranks;
  const WholeSequences whole_sequences(store_);
  ScratchScope t(ctx.scratch);
  const auto whole = [&](const Tensor& rows) { return rows ? ranks.whole(ctx, t, rows) : Tensor(); };
  const auto room = [&](const Tensor& rows) { return rows ? ranks.room(t, rows) : Tensor(); };
  const Heads heads = {whole(mine.q), mine.k, mine.v, sparse() ? whole(mine.x) : Tensor()};
  FusedGate of_all = gate;
  of_all.logits = whole(gate.logits), of_all.y = room(gate.y), of_all.dlogits = room(gate.dlogits);
  const AttentionGrads all = {room(grads.dq), t.like("attention.dk", heads.k),
                              t.like("attention.dv", heads.v)};
  const Tensor all_d_o = whole(d_o), all_dx = !sparse() ? Tensor() : into == Into::add ? whole(dx) : room(dx);
  const auto of_kind = [&](const auto& core) {
    auto saved = core.make_saved(ctx.scratch, "attention.whole", heads.q.dim(0), heads.q.dtype, bool(gate));
    core.forward(ctx, heads, *sequence.whole, of_all, saved);
    core.backward(ctx, all, all_d_o, heads, *sequence.whole, of_all, dimportance, saved);
    core.backward_input(ctx, all_dx, into, heads, *sequence.whole, saved);
  };
  std::visit(of_kind, core_);
  ranks.take_own(ctx, grads.dq, all.dq);
  ranks.take_own(ctx, grads.dk, all.dk);
  ranks.take_own(ctx, grads.dv, all.dv);
  if (gate.dlogits) ranks.take_own(ctx, gate.dlogits, of_all.dlogits);
  if (all_dx && into == Into::add) ranks.take_own(ctx, dx, all_dx);
}

void Attention::project(Context& ctx, const Tensor& y, const Tensor& x, ParamStore::Id weight,
                        const Bias& bias) const {
  linear_forward(ctx, y, x, store_.linear(weight));
  bias.forward(ctx, y);
}

std::optional<HeadGate> Attention::head_gate(const Saved& s, const Tensor& first_key) const {
  const GateChain& gates = gates_[P::sdpa_output];
  if (!gates.empty()) return gates.head_gate(s.gates[P::sdpa_output]);
  return std::visit([&](const auto& core) { return core.head_gate(s.core, first_key); }, core_);
}

void Attention::count_heads(Context& ctx, const Sequence& sequence, const Saved& s) const {
  const HeadLoad& load = *sequence.heads;
  const Sequence& counted = sequence.whole ? *sequence.whole : sequence;
  std::optional<HeadGate> gate = head_gate(s, counted.first_key);
  SLUICE_CHECK(gate, "attention: the scores of the gate at sdpa_output do not measure a head's importance");
  gate->targets = counted.targets;
  ScratchScope t(ctx.scratch);
  if (sequence.whole) {
    const auto by_head = [&](Tensor& x) { x = x.rank == 2 ? sequence.ranks->whole_heads(ctx, t, x) : x; };
    by_head(gate->lse), by_head(gate->z0), by_head(gate->sink);
    if (gate->logits && gate->logits.dim(0) > 1) gate->logits = sequence.ranks->whole(ctx, t, gate->logits);
  }
  head_importance(ctx, load.row(load.batch, layer_), load.row(load.totals, layer_), *gate,
                  counted.positions.dim(0));
}

}  // namespace sluice
