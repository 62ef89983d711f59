#include "nn/gate_chain.h"

namespace sluice {

void GateChain::add(Gate gate, std::string name) {
  gates_.push_back(gate);
  names_.push_back(std::move(name));
}

void GateChain::fuse() { fused_ = gates_.size() == 1 && gates_[0].config().input == GateInput::hidden; }

GateChain::Saved GateChain::make_saved(Arena& arena, const std::string& name, const Tensor& x,
                                       int64_t num_tokens, DType dtype) const {
  Saved s;
  s.y = x;
  for (size_t i = 0; i < gates_.size(); ++i) {
    s.gates.push_back(gates_[i].make_saved(arena, name + "." + names_[i], num_tokens, dtype));
    s.y = s.gates.back().y;
  }
  return s;
}

void GateChain::forward(Context& ctx, const Tensor& x, const Tensor& hidden, Saved& s) const {
  if (fused_) return;
  for (size_t i = 0; i < gates_.size(); ++i)
    gates_[i].forward(ctx, i == 0 ? x : s.gates[i - 1].y, hidden, s.gates[i]);
}

void GateChain::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Tensor& hidden,
                         const Saved& s, Tensor dhidden, Into& into, const Tensor& dscores,
                         const Tensor& targets) const {
  if (fused_) return;
  for (size_t i = gates_.size(); i-- > 0;)
    gates_[i].backward(ctx, dx, i + 1 == gates_.size() ? dy : dx, i == 0 ? x : s.gates[i - 1].y, hidden,
                       s.gates[i], dhidden, into, i == 0 ? dscores : Tensor(), targets);
}

FusedGate GateChain::fused_forward(Context& ctx, const Tensor& hidden, Saved& s) const {
  if (fused_) gates_[0].logits_forward(ctx, hidden, s.gates[0]);
  return fused_gate(s);
}

FusedGate GateChain::fused_gate(const Saved& s) const {
  if (!fused_) return {};
  return {.logits = s.gates[0].z, .y = s.gates[0].y, .kind = gates_[0].kind()};
}

void GateChain::fused_backward(Context& ctx, const Tensor& dlogits, const Tensor& hidden, Tensor dhidden,
                               Into& into) const {
  if (dlogits) gates_[0].logits_backward(ctx, dlogits, hidden, dhidden, into);
}

std::optional<HeadGate> GateChain::head_gate(const Saved& s) const {
  if (empty() || !measures_importance(gates_[0].kind())) return std::nullopt;
  HeadGate g;
  g.logits = gates_[0].logits(s.gates[0]);
  g.kind = gates_[0].kind();
  return g;
}

std::string gate_name(std::string_view prefix, const GateConfig& gate, size_t place) {
  std::string name(prefix);
  if (gate.input == GateInput::self) name += "self_";
  name += gate.input == GateInput::none ? "gate" : "gate_proj";
  if (place > 0) name += "_" + std::to_string(place + 1);
  return name;
}

AttentionGates::AttentionGates(const ModelConfig& config, ParamStore& store, const std::string& prefix,
                               const ByPosition<GateSite>& sites, bool input_projection) {
  ByPosition<size_t> count = {};
  for (const GateConfig& gate : config.attention.gates) {
    const GateSite& site = sites[gate.position];
    SLUICE_CHECK(!site.joined || gate.granularity == GateGranularity::elementwise,
                 "attention: a {} gate has no heads; granularity must be elementwise",
                 EnumNames<GatePosition>::names[static_cast<size_t>(gate.position)]);
    const size_t place = count[gate.position]++;
    const std::string name = gate_name(site.prefix, gate, place);
    chains_[gate.position].add(Gate(config, gate, store, prefix + "." + name, site.heads, site.channels,
                                    input_projection && order_.empty()),
                               name);
    order_.emplace_back(gate.position, place);
  }
}

}  // namespace sluice
