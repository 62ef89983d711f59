#pragma once
#include <optional>
#include <string>

#include "nn/attention_core.h"
#include "ops/attention.h"

namespace sluice {

/// Causal softmax attention (ops/attention.h), with model.attention.kind: sink a learned sink logit per head
/// (GPT-OSS): y = sigmoid(lse - sink_h) o, followed by the gate in the same pass.
class SoftmaxAttention {
 public:
  struct Saved {
    Tensor o;        // (T, H, D): the output of the softmax
    Tensor lse, z0;  // (H, T): log-sum-exp of the logits and the first visible key's logit
    Tensor y;        // (T, H, D): after the sink; o itself without a sink; empty if a gate is fused
  };

  /// `prefix`: prefix of the layer's parameter names; sinks (H) are "<prefix>.sinks".
  SoftmaxAttention(const ModelConfig& config, ParamStore& store, const std::string& prefix);
  /// gated: whether forward gets a gate.
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype, bool gated) const;

  /// s.o, s.lse, s.z0, and s.y or gate.y.
  void forward(Context& ctx, const Heads& heads, const Sequence& sequence, const FusedGate& gate,
               Saved& s) const;
  /// grads.dq, grads.dk, grads.dv and gate.dlogits overwritten, from dy (T, H, D); adds the sinks' gradient.
  /// dimportance (H) f64, or empty: the gradient of every token's importance of a head.
  void backward(Context& ctx, const AttentionGrads& grads, const Tensor& dy, const Heads& heads,
                const Sequence& sequence, const FusedGate& gate, const Tensor& dimportance,
                const Saved& s) const;

  /// Of a token's scores and weighted values; causal, so that it sees half of the sequence on average.
  Flops flops(int64_t seq_len) const {
    return {.activations = 2.0 * static_cast<double>(seq_len * heads_ * head_dim_)};
  }
  /// The implicit gate that measures each head's importance (ops/head_importance.h): the attention not spent
  /// on the sink, or not on the first key.
  HeadGate head_gate(const Saved& s, const Tensor& first_key) const;

  /// (H): the learned sink logits; empty without sinks.
  Tensor sinks() const { return sinks_ ? store_.value(*sinks_) : Tensor(); }
  /// 1 / sqrt(D)
  double scale() const { return scale_; }

 private:
  void attend(Context& ctx, const Heads& heads, const Sequence& sequence, const FusedGate& gate,
              const Tensor& y, const Tensor& o, Saved& s) const;
  AttentionInputs inputs(const Heads& heads, const Sequence& sequence) const;
  AttentionOutput output(const FusedGate& gate) const;

  ParamStore& store_;
  std::optional<ParamStore::Id> sinks_;
  int64_t heads_, head_dim_;
  double scale_;
  AttentionKernel kernel_;
  bool skip_first_;  // model.attention.head_balance.skip_first
};
static_assert(AttentionCore<SoftmaxAttention>);

}  // namespace sluice
