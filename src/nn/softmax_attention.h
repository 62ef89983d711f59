#pragma once
#include <optional>
#include <string>

#include "nn/attention_core.h"
#include "ops/attention.h"

namespace sluice {

/// Causal softmax attention (ops/attention.h) of the kind model.attention.kind:
///   sink, off_by_one   a logit per head joins the denominator: y = sigmoid(lse - sink_h) o, where sink_h is
///                      learned (gpt-oss), or 0 (Miller 2023, "Attention is off by one")
///   sink_key, kv_bias  a learned key, without or with a learned value, that every query sees
///                      (ops/extra_key.h). Neither normalised nor rotated: it has no position
///   softpick           its own weights
/// followed by the gate, in the same pass where the backend can. model.attention.window lets a query of this
/// layer see only the keys before it (ops/window.h).
class SoftmaxAttention {
 public:
  /// z0 is -inf where the sequence's first key is before the window.
  struct Saved : CoreSaved {
    Tensor first_key;  // (T) i32: of the window; empty without one
    Tensor sink;       // (H): off_by_one's zeros
    Tensor extra;      // (H, T): the extra key's logits
  };

  /// `prefix`: prefix of the layer's parameter names. sinks (H) are "<prefix>.sinks", a sink key (H, D)
  /// "<prefix>.sink_key", key and value (Hkv, D) of kv_bias "<prefix>.bias_key" and "<prefix>.bias_value".
  SoftmaxAttention(const ModelConfig& config, ParamStore& store, const std::string& prefix,
                   int64_t layer = 0);
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype, bool gated) const;

  /// s.o, s.lse, s.z0, and s.y or gate.y. With a cache per token, each token's key and value are appended to
  /// its own, and s.lse and s.z0 are not computed.
  void forward(Context& ctx, const Heads& heads, const Sequence& sequence, const FusedGate& gate,
               Saved& s) const;
  /// grads.dq, grads.dk, grads.dv and gate.dlogits overwritten, from dy (T, H, D); adds the parameters'
  /// gradients. dimportance (H) f64, or empty: the gradient of every token's importance of a head.
  void backward(Context& ctx, const AttentionGrads& grads, const Tensor& dy, const Heads& heads,
                const Sequence& sequence, const FusedGate& gate, const Tensor& dimportance,
                const Saved& s) const;
  void backward_input(Context& /*ctx*/, const Tensor& /*dx*/, Into& /*into*/, const Heads& /*heads*/,
                      const Sequence& /*sequence*/, const Saved& /*s*/) const {}

  /// Of a token's scores and weighted values, on average over its positions: causal, so that it sees half of
  /// the sequence, or of a window, w - w^2 / (2 seq_len) tokens. An extra key adds its own.
  Flops flops(int64_t seq_len) const;
  /// The implicit gate that measures each head's importance (ops/head_importance.h): the attention not spent
  /// on the sink or the extra key, or not on the first key.
  HeadGate head_gate(const Saved& s, const Tensor& first_key) const;

  /// The weight of a key with this logit, in a row with this lse, before a sink takes its share.
  double weight(double logit, double lse) const;
  /// Logits that compete with the keys: (H), or (H, T) of an extra key; empty without a sink.
  Tensor sink_logits(const Saved& s) const { return extra_key_ ? s.extra : sinks_ ? sinks() : s.sink; }
  /// (Hkv, D): the value of the extra key; empty where it is 0.
  Tensor sink_value() const { return extra_value_ ? store_.value(*extra_value_) : Tensor(); }
  /// (H): the learned sink logits; empty without them.
  Tensor sinks() const { return sinks_ ? store_.value(*sinks_) : Tensor(); }
  /// 1 / sqrt(D)
  double scale() const { return scale_; }
  /// Tokens that a query sees, itself included; 0: all.
  int64_t window() const { return window_; }

 private:
  void forward_each(Context& ctx, const Heads& heads, const Sequence& sequence, const FusedGate& gate,
                    const Saved& s) const;
  bool constant_sink() const { return kind_ == AttentionKind::off_by_one; }
  /// Whether y differs from o.
  bool joined() const { return sinks_ || extra_key_ || constant_sink(); }
  void attend(Context& ctx, const Heads& heads, const Tensor& first_key, const FusedGate& gate,
              const Tensor& y, const Tensor& o, Saved& s) const;
  void zero_and_attend(Context& ctx, const Heads& heads, const Sequence& sequence, const Tensor& first_key,
                       const FusedGate& gate, const Tensor& y, Saved& s) const;
  AttentionInputs inputs(const Heads& heads, const Tensor& first_key) const;
  AttentionOutput output(const FusedGate& gate, const Saved& s) const;
  Tensor grad(const std::optional<ParamStore::Id>& id) const { return id ? store_.grad(*id) : Tensor(); }

  ParamStore& store_;
  AttentionKind kind_;
  std::optional<ParamStore::Id> sinks_, extra_key_, extra_value_;
  int64_t layer_, heads_, head_dim_, window_;
  double scale_;
  AttentionKernel kernel_;
  bool skip_first_;  // model.attention.head_balance.skip_first
};
static_assert(AttentionCore<SoftmaxAttention>);

}  // namespace sluice
