#include "nn/attention.h"

#include <cmath>

#include "nn/init.h"
#include "nn/weight_gradient.h"
#include "ops/activation.h"
#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/linear.h"
#include "ops/rope.h"
#include "ops/value_zeroing.h"

namespace sluice {
namespace {

/// "gate_proj" for the paper's main position, "value_gate_proj" and so on for the others; "gate" instead of
/// "gate_proj" for a learned constant; the n-th of a position carries its number.
std::string gate_name(const std::vector<GateConfig>& gates, size_t index) {
  const GateConfig& gate = gates[index];
  size_t number = 1;
  for (size_t i = 0; i < index; ++i) number += gates[i].position == gate.position;
  std::string name;
  if (gate.position == GatePosition::query) name = "query_";
  if (gate.position == GatePosition::key) name = "key_";
  if (gate.position == GatePosition::value) name = "value_";
  if (gate.position == GatePosition::dense_output) name = "dense_";
  name += gate.input == GateInput::hidden ? "gate_proj" : "gate";
  if (number > 1) name += "_" + std::to_string(number);
  return name;
}

Tensor matrix(const Tensor& t) { return t.view({t.dim(0), t.numel() / t.dim(0)}); }

}  // namespace

Attention::Attention(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t layer)
    : config_(config),
      store_(store),
      layer_(layer),
      scale_(1.0 / std::sqrt(static_cast<double>(config.head_dim))) {
  const int64_t C = config.hidden_size, H = config.num_attention_heads, Hkv = config.num_key_value_heads,
                D = config.head_dim;
  const AttentionConfig& attention = config.attention;
  SLUICE_CHECK(Hkv > 0 && H % Hkv == 0, "attention: {} heads over {} key/value heads", H, Hkv);
  SLUICE_CHECK(D % 2 == 0, "attention: head_dim must be even, got {}", D);

  const auto projection = [&](const std::string& name, int64_t out, int64_t in, Init init) {
    return store.add({.name = prefix + "." + name + ".weight",
                      .shape = {out, in},
                      .init = init,
                      .packed = true,
                      .when_frozen = WhenFrozen::adapted});
  };
  const auto matrix_projection = [&](const std::string& name, int64_t out) {
    return projection(name, out, C, matrix_init(config, out, C));
  };
  q_proj_ = matrix_projection("q_proj", H * D);
  const SwitchHeadsConfig& experts = attention.switch_heads;
  const bool switch_values = experts.num_experts > 0,
             switch_keys = switch_values && experts.projections == SwitchProjections::key_value;
  k_proj_ = matrix_projection("k_proj", switch_keys ? SwitchHeads::rows(config) : Hkv * D);
  v_proj_ = matrix_projection("v_proj", switch_values ? SwitchHeads::rows(config) : Hkv * D);
  o_proj_ = projection("o_proj", C, H * D, residual_init(config));
  // In the place of the gates that they are with one expert.
  if (switch_keys) k_switch_.emplace(config, store, prefix + ".k_switch.weight");
  if (switch_values) v_switch_.emplace(config, store, prefix + ".v_switch.weight");

  gates_.reserve(attention.gates.size());
  for (size_t i = 0; i < attention.gates.size(); ++i) {
    const GateConfig& gate = attention.gates[i];
    const bool dense = gate.position == GatePosition::dense_output;
    SLUICE_CHECK(!dense || gate.granularity == GateGranularity::elementwise,
                 "attention: a dense_output gate has no heads; granularity must be elementwise");
    const bool key_or_value = gate.position == GatePosition::key || gate.position == GatePosition::value;
    const int64_t heads = key_or_value ? Hkv : H;
    gates_.emplace_back(config, gate, store, prefix + "." + gate_name(attention.gates, i) + ".weight",
                        dense ? 1 : heads, dense ? C : D);
  }
  if (config.qk_norm) {
    q_norm_.emplace(config, store, prefix + ".q_norm.weight", std::vector<int64_t>{D});
    k_norm_.emplace(config, store, prefix + ".k_norm.weight", std::vector<int64_t>{D});
  }
  if (attention.kind == AttentionKind::sink)
    sinks_ = store.add(
        {.name = prefix + ".sinks", .shape = {H}, .init = Init::normal(0.02), .weight_decay = false});
  if (attention.output_norm != OutputNorm::none) {
    const bool shared = attention.output_norm == OutputNorm::rmsnorm_shared;
    output_norm_.emplace(config, store, prefix + ".o_norm.weight",
                         shared ? std::vector<int64_t>{D} : std::vector<int64_t>{H, D});
  }
}

Attention::Saved Attention::make_saved(Arena& arena, const std::string& name, int64_t T, DType dtype) const {
  const int64_t C = config_.hidden_size, H = config_.num_attention_heads, Hkv = config_.num_key_value_heads,
                D = config_.head_dim;
  const DType wide = accumulate_dtype(dtype);
  const auto per_head = [&](const char* what, int64_t heads) {
    return arena.alloc(name + "." + what, dtype, {T, heads, D});
  };
  Saved s;
  s.q = per_head("q", H);
  s.k = per_head("k", Hkv);
  s.v = per_head("v", Hkv);
  if (k_switch_) s.k_switch = k_switch_->make_saved(arena, name + ".k_switch", T, dtype);
  if (v_switch_) s.v_switch = v_switch_->make_saved(arena, name + ".v_switch", T, dtype);
  for (size_t i = 0; i < gates_.size(); ++i)
    s.gates.push_back(
        gates_[i].make_saved(arena, name + "." + gate_name(config_.attention.gates, i), T, dtype));
  if (q_norm_) {
    s.q_norm = q_norm_->make_saved(arena, name + ".q_norm", dtype, {T, H, D});
    s.k_norm = k_norm_->make_saved(arena, name + ".k_norm", dtype, {T, Hkv, D});
    s.q_rot = s.q_norm.y;
    s.k_rot = s.k_norm.y;
  } else {
    // Nobody reads the unrotated ones again: a gate's backward needs its input, not its output.
    s.q_rot = after_gates(GatePosition::query, s.q, s);
    s.k_rot = after_gates(GatePosition::key, s.k, s);
  }
  s.o = per_head("o", H);
  s.lse = arena.alloc(name + ".lse", wide, {H, T});
  s.z0 = arena.alloc(name + ".z0", wide, {H, T});
  // Fused, only the gated output exists.
  s.o_sink = !sinks_ ? s.o : fuses_gate() ? Tensor() : per_head("o_sink", H);
  if (output_norm_)
    s.output_norm = output_norm_->make_saved(arena, name + ".o_norm", dtype, {T, H, D});
  else
    s.output_norm.y = s.o_sink;
  s.o_act =
      config_.attention.output_activation == OutputActivation::silu ? per_head("o_act", H) : s.output_norm.y;
  s.o_gated = after_gates(GatePosition::sdpa_output, s.o_act, s);
  s.dense = arena.alloc(name + ".dense", dtype, {T, C});
  s.y = matrix(after_gates(GatePosition::dense_output, s.dense, s));
  return s;
}

void Attention::forward(Context& ctx, const Tensor& x, const Sequence& sequence, Saved& s) const {
  linear_forward(ctx, matrix(s.q), x, store_.linear(q_proj_));
  linear_forward(ctx, matrix(k_switch_ ? s.k_switch.projected : s.k), x, store_.linear(k_proj_));
  linear_forward(ctx, matrix(v_switch_ ? s.v_switch.projected : s.v), x, store_.linear(v_proj_));
  if (k_switch_) k_switch_->forward(ctx, s.k, x, s.k_switch);
  if (v_switch_) v_switch_->forward(ctx, s.v, x, s.v_switch);

  const Tensor q = gates_forward(ctx, GatePosition::query, s.q, x, s);
  const Tensor k = gates_forward(ctx, GatePosition::key, s.k, x, s);
  Tensor values = gates_forward(ctx, GatePosition::value, s.v, x, s);
  if (q_norm_ && !norm_after_rope()) {
    q_norm_->forward_rope(ctx, q, sequence.positions, sequence.rope_cos, sequence.rope_sin, s.q_norm);
    k_norm_->forward_rope(ctx, k, sequence.positions, sequence.rope_cos, sequence.rope_sin, s.k_norm);
  } else if (q_norm_) {  // rotated in place, as without a norm: what the norms read stays
    rope_forward(ctx, q, q, sequence.positions, sequence.rope_cos, sequence.rope_sin);
    rope_forward(ctx, k, k, sequence.positions, sequence.rope_cos, sequence.rope_sin);
    q_norm_->forward(ctx, q, s.q_norm);
    k_norm_->forward(ctx, k, s.k_norm);
  } else {
    rope_forward(ctx, s.q_rot, s.q_rot, sequence.positions, sequence.rope_cos, sequence.rope_sin);
    rope_forward(ctx, s.k_rot, s.k_rot, sequence.positions, sequence.rope_cos, sequence.rope_sin);
  }

  Tensor keys = s.k_rot;
  if (const KeyValueCache* cache = sequence.cache) {
    const auto append = [&](const Tensor& all, const Tensor& fresh) {
      cast(ctx, all.rows(cache->length, fresh.dim(0)), fresh);
      return all.rows(0, cache->length + fresh.dim(0));
    };
    keys = append(cache->keys[static_cast<size_t>(layer_)], keys);
    values = append(cache->values[static_cast<size_t>(layer_)], values);
  }
  if (fuses_gate()) gates_[output_gate()].logits_forward(ctx, x, s.gates[output_gate()]);
  attend(ctx, keys, values, sequence, s);

  if (output_norm_) output_norm_->forward(ctx, s.o_sink, s.output_norm);
  if (config_.attention.output_activation == OutputActivation::silu)
    silu_forward(ctx, s.o_act, s.output_norm.y);
  if (!fuses_gate()) gates_forward(ctx, GatePosition::sdpa_output, s.o_act, x, s);
  if (sequence.heads) count_heads(ctx, sequence, s);
  linear_forward(ctx, s.dense, matrix(s.o_gated), store_.linear(o_proj_));
  gates_forward(ctx, GatePosition::dense_output, s.dense, x, s);
}

void Attention::attend(Context& ctx, const Tensor& keys, const Tensor& values, const Sequence& sequence,
                       Saved& s) const {
  const AttentionOutput output = fused_output(s);
  const bool fused = output.sink || output.gate;
  const auto attention = [&](const Tensor& y, const Tensor& o, const Tensor& v) {
    const AttentionKernel kernel = config_.attention.kernel;
    if (fused)
      gated_attention_forward(ctx, y, o, s.lse, s.z0, s.q_rot, keys, v, sequence.first_key, scale_, output,
                              kernel);
    else
      attention_forward(ctx, o, s.lse, s.z0, s.q_rot, keys, v, sequence.first_key, scale_, kernel);
  };
  const Tensor y = output.gate ? s.o_gated : s.o_sink;
  if (!sequence.zeroing) return attention(y, s.o, values);

  SLUICE_CHECK(!sequence.cache,
               "attention: values of first tokens are zeroed without a cache of keys and values only");
  ScratchScope t(ctx.scratch);
  const Tensor zeroed = t.like("attention.zeroed", values);
  zero_first_values(ctx, zeroed, values, sequence.first_key);
  if (!sequence.zeroing->sinks_above) return attention(y, s.o, zeroed);
  const Tensor other = t.like("attention.other_o", s.o),
               other_y = fused ? t.like("attention.other_y", s.o) : Tensor();
  attention(other_y, other, zeroed);
  attention(y, s.o, values);
  take_sink_heads(ctx, s.o, other, s.lse, s.z0, sinks(), *sequence.zeroing->sinks_above);
  if (fused) take_sink_heads(ctx, y, other_y, s.lse, s.z0, sinks(), *sequence.zeroing->sinks_above);
}

void Attention::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Sequence& sequence,
                         const Saved& s) const {
  SLUICE_CHECK(!sequence.cache, "attention: no backward through a cache of keys and values");
  ScratchScope t(ctx.scratch);
  const Tensor d_o = t.like("attention.d_o", s.o), dq = t.like("attention.dq", s.q),
               dk = t.like("attention.dk", s.k), dv = t.like("attention.dv", s.v);
  Into into = Into::overwrite;  // x has several readers: the first writes dx, the others add
  const auto project_backward = [&](const Tensor& d, ParamStore::Id weight) {
    linear_backward_input(ctx, dx, matrix(d), store_.linear(weight), into);
    weight_backward(ctx, store_, weight, matrix(d), x);
    into = Into::add;
  };

  Tensor ddense = dy;
  if (has_gate(GatePosition::dense_output)) {
    ddense = t.like("attention.ddense", s.dense);
    cast(ctx, ddense, dy);
    gates_backward(ctx, GatePosition::dense_output, ddense, s.dense, x, s, dx, into);
  }
  linear_backward_input(ctx, matrix(d_o), ddense, store_.linear(o_proj_), Into::overwrite);
  weight_backward(ctx, store_, o_proj_, ddense, matrix(s.o_gated));
  const Tensor dhead = sequence.heads ? sequence.heads->gradient(layer_) : Tensor();
  if (!fuses_gate()) gates_backward(ctx, GatePosition::sdpa_output, d_o, s.o_act, x, s, dx, into, dhead);
  if (config_.attention.output_activation == OutputActivation::silu)
    silu_backward(ctx, d_o, d_o, s.output_norm.y);
  if (output_norm_) output_norm_->backward(ctx, d_o, d_o, s.o_sink, s.output_norm);

  AttentionOutput output = fused_output(s);
  if (output.gate) output.dhead = dhead;
  Tensor dlse, coef0;  // of the balance of heads that no gate says the openness of
  if (dhead && !has_gate(GatePosition::sdpa_output)) {
    dlse = t.like("attention.dlse", s.lse);
    if (!sinks_) coef0 = t.like("attention.coef0", s.lse);
    head_importance_backward(ctx, dlse, coef0, sinks_ ? store_.grad(*sinks_) : Tensor(), dhead,
                             *head_gate(s, sequence.first_key));
  }
  const AttentionKernel kernel = config_.attention.kernel;
  const Tensor values = after_gates(GatePosition::value, s.v, s);
  if (output.sink || output.gate) {
    const Tensor dz = output.gate ? t.like("attention.dgate", output.gate) : Tensor();
    gated_attention_backward(ctx, dq, dk, dv, dz, output.sink ? store_.grad(*sinks_) : Tensor(), d_o, s.q_rot,
                             s.k_rot, values, s.o, s.lse, sequence.first_key, scale_, output, dlse, coef0,
                             kernel);
    if (output.gate) gates_[output_gate()].logits_backward(ctx, dz, x, dx, into);
  } else {
    attention_backward(ctx, dq, dk, dv, d_o, s.q_rot, s.k_rot, values, s.o, s.lse, sequence.first_key, scale_,
                       dlse, coef0, kernel);
  }

  if (q_norm_ && !norm_after_rope()) {
    q_norm_->backward_rope(ctx, dq, dq, after_gates(GatePosition::query, s.q, s), sequence.positions,
                           sequence.rope_cos, sequence.rope_sin, s.q_norm);
    k_norm_->backward_rope(ctx, dk, dk, after_gates(GatePosition::key, s.k, s), sequence.positions,
                           sequence.rope_cos, sequence.rope_sin, s.k_norm);
  } else {
    if (q_norm_) {
      q_norm_->backward(ctx, dq, dq, after_gates(GatePosition::query, s.q, s), s.q_norm);
      k_norm_->backward(ctx, dk, dk, after_gates(GatePosition::key, s.k, s), s.k_norm);
    }
    rope_backward(ctx, dq, dq, sequence.positions, sequence.rope_cos, sequence.rope_sin);
    rope_backward(ctx, dk, dk, sequence.positions, sequence.rope_cos, sequence.rope_sin);
  }
  gates_backward(ctx, GatePosition::query, dq, s.q, x, s, dx, into);
  gates_backward(ctx, GatePosition::key, dk, s.k, x, s, dx, into);
  const Tensor dk_proj = k_switch_ ? t.like("attention.dk_experts", s.k_switch.projected) : dk;
  if (k_switch_) k_switch_->backward(ctx, dk_proj, dk, x, s.k_switch, dx, into);
  gates_backward(ctx, GatePosition::value, dv, s.v, x, s, dx, into);
  const Tensor dv_proj = v_switch_ ? t.like("attention.dv_experts", s.v_switch.projected) : dv;
  if (v_switch_) v_switch_->backward(ctx, dv_proj, dv, x, s.v_switch, dx, into);

  project_backward(dq, q_proj_);
  project_backward(dk_proj, k_proj_);
  project_backward(dv_proj, v_proj_);
}

/// One gate at sdpa_output, of the input, with nothing between it and attention.
bool Attention::fuses_gate() const {
  int64_t count = 0;
  for (const Gate& gate : gates_) count += gate.config().position == GatePosition::sdpa_output;
  return count == 1 && gates_[output_gate()].config().input == GateInput::hidden && !output_norm_ &&
         config_.attention.output_activation == OutputActivation::none;
}

size_t Attention::output_gate() const {
  size_t i = 0;
  while (gates_[i].config().position != GatePosition::sdpa_output) ++i;
  return i;
}

AttentionOutput Attention::fused_output(const Saved& s) const {
  AttentionOutput output;
  output.sink = sinks();
  if (fuses_gate()) {
    output.gate = s.gates[output_gate()].z;
    output.kind = gates_[output_gate()].kind();
  }
  return output;
}

bool Attention::has_gate(GatePosition position) const {
  for (const Gate& gate : gates_)
    if (gate.config().position == position) return true;
  return false;
}

/// x, or what the last gate of this position made of it.
Tensor Attention::after_gates(GatePosition position, const Tensor& x, const Saved& s) const {
  Tensor y = x;
  for (size_t i = 0; i < gates_.size(); ++i)
    if (gates_[i].config().position == position) y = s.gates[i].y;
  return y;
}

Tensor Attention::gates_forward(Context& ctx, GatePosition position, const Tensor& x, const Tensor& hidden,
                                Saved& s) const {
  Tensor y = x;
  for (size_t i = 0; i < gates_.size(); ++i) {
    if (gates_[i].config().position != position) continue;
    gates_[i].forward(ctx, y, hidden, s.gates[i]);
    y = s.gates[i].y;
  }
  return y;
}

std::optional<HeadGate> Attention::head_gate(const Saved& s, const Tensor& first_key) const {
  HeadGate g;
  g.skip_first = config_.attention.head_balance.skip_first;
  if (has_gate(GatePosition::sdpa_output)) {
    const Gate& gate = gates_[output_gate()];
    if (!says_openness(gate.config())) return std::nullopt;
    g.logits = gate.logits(s.gates[output_gate()]);
    g.kind = gate.kind();
    return g;
  }
  g.lse = s.lse;
  if (sinks_) {
    g.sink = sinks();
  } else {
    g.z0 = s.z0;
    g.first_key = first_key;
  }
  return g;
}

void Attention::count_heads(Context& ctx, const Sequence& sequence, const Saved& s) const {
  const HeadLoad& load = *sequence.heads;
  const std::optional<HeadGate> gate = head_gate(s, sequence.first_key);
  SLUICE_CHECK(gate, "attention: the scores of the gate at sdpa_output do not say how open a head is");
  head_importance(ctx, load.row(load.batch, layer_), load.row(load.totals, layer_), *gate, s.o.dim(0));
}

/// In place: d is the gradient of the last gate's output on entry, of x on return. dhead: of the first one's
/// scores.
void Attention::gates_backward(Context& ctx, GatePosition position, Tensor d, const Tensor& x,
                               const Tensor& hidden, const Saved& s, Tensor dhidden, Into& into,
                               const Tensor& dhead) const {
  for (size_t i = gates_.size(); i-- > 0;) {
    if (gates_[i].config().position != position) continue;
    Tensor input = x;
    bool first = true;
    for (size_t j = 0; j < i; ++j)
      if (gates_[j].config().position == position) input = s.gates[j].y, first = false;
    gates_[i].backward(ctx, d, d, input, hidden, s.gates[i], dhidden, into, first ? dhead : Tensor());
  }
}

}  // namespace sluice
