#pragma once
#include <optional>
#include <string>

#include "nn/exclusive.h"
#include "nn/gate_chain.h"
#include "nn/output_transform.h"
#include "nn/qk_position.h"
#include "nn/sequence.h"
#include "nn/softmax_attention.h"
#include "nn/sparse_attention.h"
#include "nn/switch_heads.h"

namespace sluice {

/// Grouped-query causal attention with gates at any of five positions (Gated Attention, Qiu et al. 2025,
/// figure 1):
///   q,k,v projections -> [query, key, value gates] -> norm of queries and keys, rotary embedding
///   -> core (softmax, [sink]) -> [exclusive] -> [norm] -> [SiLU] -> [sdpa_output gates] -> o_proj
///   -> [dense_output gates]
/// Gates of one position apply in the order of the list. Each computes its logits from the layer's input (the
/// pre-normalised hidden state), or from what it gates, with its own projection. With switch heads values
/// (and keys) are projections of a few experts of their head (nn/switch_heads.h). A stage that is not
/// configured is the identity.
class Attention {
 public:
  /// The tensors that backward and analysis read. T tokens, H/Hkv heads, D head_dim, C hidden. The y of a
  /// stage that is the identity is its input.
  struct Saved {
    Tensor q;                       // (T, H, D): the projection
    SwitchHeads::Saved k, v;        // y (T, Hkv, D): the projections, or the outputs of switch heads
    AttentionGates::Saved gates;    // logits and gated values, by position
    QkPosition::Saved q_position;   // y (T, H, D): input of the scores
    QkPosition::Saved k_position;   // y (T, Hkv, D)
    SparseAttention::Saved sparse;  // the indexer and its choice; empty of other kinds
    SoftmaxAttention::Saved core;   // y (T, H, D); empty if the core applies the gate at sdpa_output
    Exclusive::Saved exclusive;     // y (T, H, D); empty likewise
    OutputTransform::Saved output;  // y (T, H, D): input of the gates at sdpa_output; empty likewise
    Tensor dense;                   // (T, C): output of o_proj, before the dense_output gates
    Tensor y;                       // (T, C): the layer's output
  };

  Attention(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t layer);
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype) const;

  /// s.y from x (T, C). With a KV cache, appends this batch's keys and values after cache->length; with one
  /// per token, each token's to its own, and s.core.lse and s.core.z0 are not computed.
  void forward(Context& ctx, const Tensor& x, const Sequence& sequence, Saved& s) const;
  /// dx (T, C) overwritten. Without a cache only.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Sequence& sequence,
                const Saved& s) const;

  /// Of a token of a sequence of seq_len, on average over its positions.
  Flops flops(int64_t seq_len) const;

  const AttentionGates& gates() const { return gates_; }
  const SoftmaxAttention& core() const { return core_; }
  /// nullptr of other kinds.
  const SparseAttention* sparse() const { return sparse_ ? &*sparse_ : nullptr; }
  /// Logits that compete with the keys: (H), or (H, T) of an extra key; empty without a sink.
  Tensor sink_logits(const Saved& s) const { return sparse_ ? sparse_->sinks() : core_.sink_logits(s.core); }
  /// (Hkv, D): what their share of attention adds to the output; empty where it is nothing.
  Tensor sink_value() const { return sparse_ ? Tensor() : core_.extra_value(); }
  /// The gate that measures the importance of heads after a forward: the first gate at sdpa_output, or else
  /// the implicit gate of the core. Empty if the scores of that gate are not suitable (measures_importance).
  std::optional<HeadGate> head_gate(const Saved& s, const Tensor& first_key) const;

 private:
  void attend_each(Context& ctx, const Heads& heads, const Sequence& sequence, const FusedGate& gate,
                   const SoftmaxAttention::Saved& s) const;
  void count_heads(Context& ctx, const Sequence& sequence, const Saved& s) const;

  ParamStore& store_;
  int64_t layer_, heads_, head_dim_, hidden_size_;
  // In the order in which their parameters are registered.
  ParamStore::Id q_proj_, k_proj_, v_proj_, o_proj_;
  SwitchHeads k_switch_, v_switch_;
  AttentionGates gates_;
  QkPosition q_position_, k_position_;
  SoftmaxAttention core_;  // of all kinds but sparse
  std::optional<SparseAttention> sparse_;
  Exclusive exclusive_;
  OutputTransform output_;
};
static_assert(Layer<Attention, Sequence>);

}  // namespace sluice
