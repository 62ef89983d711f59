#pragma once
#include <optional>
#include <string>

#include "config/config.h"
#include "nn/flops.h"
#include "nn/layer.h"
#include "ops/gate.h"
#include "params/param_store.h"

namespace sluice {

/// One gate of an attention layer (Qiu et al. 2025, eq. 5): y = x * a(z) or x + a(z) with logits z = u W^T +
/// b, or a learned constant. u is the hidden state, its leading channels, or x itself; b is optional. The
/// attention layer decides what it gates.
class Gate {
 public:
  struct Saved {
    Tensor z;  // logits: (T, H, D) elementwise or (T, H) headwise; empty for a learned constant, see logits()
    Tensor y;  // (T, H, D): the gated x
  };

  /// Gates x (T, heads, channels). `name`: its parameters are "<name>.weight" and, with a bias,
  /// "<name>.bias". input_projection: the logits' weight takes part in InputProjections.
  Gate(const ModelConfig& model, const GateConfig& config, ParamStore& store, const std::string& name,
       int64_t heads, int64_t channels, bool input_projection = false);
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype) const;

  /// s.y from x (T, H, D), or any shape with the same number of elements, and hidden (T, C).
  void forward(Context& ctx, const Tensor& x, const Tensor& hidden, Saved& s) const;
  /// dx is overwritten and may alias dy. dhidden (T, C) is written according to `into`, which becomes
  /// Into::add; a gate that does not read the hidden state changes neither. dhead (H), or empty: as in
  /// gate_backward; not of padding, if targets (T) i32 are given.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Tensor& hidden,
                const Saved& s, Tensor dhidden, Into& into, const Tensor& dhead = {},
                const Tensor& targets = {}) const;

  /// The same in two parts, for a gate of the hidden state that is fused into the computation of x: s.z
  /// before it, and the gradients from dz (the shape of s.z) after it.
  void logits_forward(Context& ctx, const Tensor& hidden, Saved& s) const;
  void logits_backward(Context& ctx, const Tensor& dz, const Tensor& hidden, Tensor dhidden,
                       Into& into) const;

  const GateConfig& config() const { return config_; }
  ParamStore::Id weight() const { return weight_; }
  /// Of the logits' projection; none for a learned constant.
  Flops flops() const { return projects() ? product_flops(store_, weight_) : Flops(); }
  /// Logits of the last forward: s.z, or (1, H, D) / (1, H) for a learned constant.
  Tensor logits(const Saved& s) const;
  GateKind kind() const {
    return {.activation = config_.activation, .sharing = config_.heads, .combine = config_.combine};
  }

 private:
  bool projects() const { return config_.input != GateInput::none; }
  int64_t input_size(const ModelConfig& model) const;
  Tensor as_logits(const Tensor& parameter) const;
  Tensor leading_channels(Context& ctx, ScratchScope& t, const Tensor& hidden) const;
  void project(Context& ctx, const Tensor& u, Saved& s) const;
  void project_backward(Context& ctx, Tensor du, const Tensor& dz, const Tensor& u, Into into) const;

  GateConfig config_;
  ParamStore& store_;
  ParamStore::Id weight_;
  std::optional<ParamStore::Id> bias_;
  int64_t heads_, channels_;
};

}  // namespace sluice
