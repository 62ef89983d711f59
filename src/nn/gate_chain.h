#pragma once
// The gates of an attention layer, position by position (Gated Attention, Qiu et al. 2025, figure 1: G1 to
// G5).
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nn/gate.h"
#include "ops/head_importance.h"

namespace sluice {

/// One T for each position of a gate.
template <class T>
class ByPosition {
 public:
  T& operator[](GatePosition position) { return of_[static_cast<size_t>(position)]; }
  const T& operator[](GatePosition position) const { return of_[static_cast<size_t>(position)]; }

 private:
  std::array<T, EnumNames<GatePosition>::names.size()> of_;
};

/// A gate position: the prefix of its gates' parameter names, and the shape (T, heads, channels) of the gated
/// tensor.
struct GateSite {
  std::string_view prefix;
  int64_t heads, channels;
  bool joined = false;  // the heads are joined to one row of channels: no gate per head
};

/// The name of the place-th gate (from 0) of a position, behind its layer's: "gate_proj", "self_gate_proj",
/// or "gate" of a learned constant; from the second on with its number, "value_gate_proj_2".
std::string gate_name(std::string_view prefix, const GateConfig& gate, size_t place);

/// A gate that the attention core applies while it writes its output, instead of the chain after it. Empty if
/// there is none.
struct FusedGate {
  Tensor logits;  // (T, H, D) or (T, H)
  Tensor y;       // (T, H, D): where the gated output goes
  GateKind kind = {};
  Tensor dlogits = {};  // backward: the shape of logits, overwritten
  Tensor dscores = {};  // backward: (H) f64, or empty; as dhead of gate_backward

  explicit operator bool() const { return bool(logits); }
};

/// The gates of one position, applied one after the other; without gates, the identity. T tokens, H heads and
/// D channels of the position, C hidden.
class GateChain {
 public:
  struct Saved {
    std::vector<Gate::Saved> gates;  // in the order of application
    Tensor y;  // (T, H, D), or x's shape without gates: the last gate's output, or x itself
  };

  /// Appends a gate. `name` is that of its saved tensors.
  void add(Gate gate, std::string name);
  /// Fuses the gate into the preceding core if it is the only one and its logits come from the hidden state.
  /// forward and backward then do nothing; fused_forward and fused_backward replace them.
  void fuse();

  bool empty() const { return gates_.empty(); }
  bool fused() const { return fused_; }
  const Gate& gate(size_t i) const { return gates_[i]; }

  /// x: the input of forward; it may be empty for a fused chain.
  Saved make_saved(Arena& arena, const std::string& name, const Tensor& x, int64_t num_tokens,
                   DType dtype) const;

  /// s.y from x (T, H, D), or any shape with the same number of elements, and hidden (T, C).
  void forward(Context& ctx, const Tensor& x, const Tensor& hidden, Saved& s) const;
  /// dx is overwritten and may alias dy; without gates it is not touched. dhidden (T, C) is written according
  /// to `into`, which becomes Into::add. dscores (H) f64, or empty: a gradient of the first gate's mean
  /// scores, as dhead and targets of Gate::backward.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Tensor& hidden,
                const Saved& s, Tensor dhidden, Into& into, const Tensor& dscores = {},
                const Tensor& targets = {}) const;

  /// For a fused chain, the gate's logits and the other inputs that the core needs to apply it; otherwise
  /// empty.
  FusedGate fused_forward(Context& ctx, const Tensor& hidden, Saved& s) const;
  /// The same without computing.
  FusedGate fused_gate(const Saved& s) const;
  /// The gradients that follow from the logits' gradient, which the core has computed. Does nothing if
  /// dlogits is empty.
  void fused_backward(Context& ctx, const Tensor& dlogits, const Tensor& hidden, Tensor dhidden,
                      Into& into) const;

  /// The first gate as the measure of each head's importance (ops/head_importance.h); empty without gates, or
  /// if its scores are no such measure.
  std::optional<HeadGate> head_gate(const Saved& s) const;

 private:
  std::vector<Gate> gates_;
  std::vector<std::string> names_;
  bool fused_ = false;
};

/// All gates of an attention layer.
class AttentionGates {
 public:
  using Saved = ByPosition<GateChain::Saved>;

  /// Registers the gates' parameters in the order of the configuration's list, which is also the order of
  /// application within a position. `prefix`: of the layer's parameters. sites: of every position.
  /// input_projection: the first gate's weight takes part in InputProjections.
  AttentionGates(const ModelConfig& config, ParamStore& store, const std::string& prefix,
                 const ByPosition<GateSite>& sites, bool input_projection = false);

  void fuse(GatePosition position) { chains_[position].fuse(); }
  const GateChain& operator[](GatePosition position) const { return chains_[position]; }

  // In the order of the configuration's list.
  size_t size() const { return order_.size(); }
  const Gate& gate(size_t i) const { return chains_[order_[i].first].gate(order_[i].second); }
  const Gate::Saved& saved(const Saved& s, size_t i) const {
    return s[order_[i].first].gates[order_[i].second];
  }

 private:
  ByPosition<GateChain> chains_;
  std::vector<std::pair<GatePosition, size_t>> order_;  // of a gate: its position, and its place there
};

}  // namespace sluice
