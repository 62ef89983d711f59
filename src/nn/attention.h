#pragma once
#include <optional>
#include <string>
#include <variant>

#include "nn/bias.h"
#include "nn/exclusive.h"
#include "nn/gate_chain.h"
#include "nn/input_projections.h"
#include "nn/output_transform.h"
#include "nn/qk_position.h"
#include "nn/sequence.h"
#include "nn/sequence_ranks.h"
#include "nn/softmax_attention.h"
#include "nn/sparse_attention.h"
#include "nn/switch_heads.h"

namespace sluice {

/// Grouped-query causal attention with gates at any of five positions (Gated Attention, Qiu et al. 2025,
/// figure 1):
///   q,k,v projections [+ biases] -> [query, key, value gates] -> norm of queries and keys, rotary embedding
///   -> core (all keys, or selected ones; [sink]) -> [exclusive] -> [norm] -> [SiLU] -> [sdpa_output gates]
///   -> o_proj [+ bias]
///   -> [dense_output gates]
/// Gates of one position apply in the order of the list. Each computes its logits from the layer's input (the
/// pre-normalised hidden state), or from what it gates, with its own projection. With switch heads values
/// (and keys) are projections of a few experts of their head (nn/switch_heads.h). A stage that is not
/// configured is the identity.
class Attention {
 public:
  /// Attention over all visible keys, or over selected ones.
  using Core = std::variant<SoftmaxAttention, SparseAttention>;

  /// The tensors that backward and analysis read. T tokens, H/Hkv heads, D head_dim, C hidden. The y of a
  /// stage that is the identity is its input.
  struct Saved {
    Tensor q;                       // (T, H, D): the projection
    SwitchHeads::Saved k, v;        // y (T, Hkv, D): the projections, or the outputs of switch heads
    AttentionGates::Saved gates;    // logits and gated values, by position
    QkPosition::Saved q_position;   // y (T, H, D): input of the scores
    QkPosition::Saved k_position;   // y (T, Hkv, D)
    SparseAttention::Saved core;    // y (T, H, D); empty if the core applies the gate at sdpa_output; what
                                    // the other kind of core saves is empty
    Exclusive::Saved exclusive;     // y (T, H, D); empty likewise
    OutputTransform::Saved output;  // y (T, H, D): input of the gates at sdpa_output; empty likewise
    Tensor dense;                   // (T, C): output of o_proj, before the dense_output gates
    Tensor y;                       // (T, C): the layer's output
  };

  /// sequence_ranks: how many ranks share a sequence.
  Attention(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t layer,
            int64_t sequence_ranks = 1);
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype) const;

  /// s.y from x (T, C). With a KV cache, appends this batch's keys and values after cache->length; with one
  /// per token, each token's to its own.
  void forward(Context& ctx, const Tensor& x, const Sequence& sequence, Saved& s) const;
  /// dx (T, C) overwritten. Without a cache only.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Sequence& sequence,
                const Saved& s) const;
  /// The keys and values of all ranks that share the sequence, on their way; of a rank alone, none.
  struct Gathered {
    SequenceRanks::Gather k = {}, v = {};  // whole (N T, Hkv, D)
  };
  /// Collective. Begins what backward waits for, in memory of t. The earlier it is called, the more
  /// computation the communication is hidden behind.
  Gathered begin_gather(Context& ctx, ScratchScope& t, const Sequence& sequence, const Saved& s) const;
  /// backward, after begin_gather.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Sequence& sequence,
                const Gathered& gathered, const Saved& s) const;

  /// Of a token of a sequence of seq_len, on average over its positions.
  Flops flops(int64_t seq_len) const;

  const AttentionGates& gates() const { return gates_; }
  /// Of AttentionCore.
  Tensor sink_logits(const Saved& s) const {
    return std::visit([&](const auto& core) { return core.sink_logits(s.core); }, core_);
  }
  Tensor sink_value() const {
    return std::visit([](const auto& core) { return core.sink_value(); }, core_);
  }
  double weight(double logit, double lse) const {
    return std::visit([&](const auto& core) { return core.weight(logit, lse); }, core_);
  }
  double scale() const {
    return std::visit([](const auto& core) { return core.scale(); }, core_);
  }
  /// nullptr of the other kind.
  const SoftmaxAttention* softmax() const { return std::get_if<SoftmaxAttention>(&core_); }
  const SparseAttention* sparse() const { return std::get_if<SparseAttention>(&core_); }
  /// The gate that measures the importance of heads after a forward: the first gate at sdpa_output, or else
  /// the implicit gate of the core. Empty if the scores of that gate are not suitable (measures_importance).
  std::optional<HeadGate> head_gate(const Saved& s, const Tensor& first_key) const;

 private:
  /// y (T, N) from x (T, K).
  void project(Context& ctx, const Tensor& y, const Tensor& x, ParamStore::Id weight, const Bias& bias) const;
  /// The core's backward where its sums over tokens are to be those of whole sequences: as one rank computes
  /// them, of what all ranks that share them have, its state once more. Of the gradients this rank keeps its
  /// own tokens'. Arguments are AttentionCore's; `gate` has this rank's logits.
  void whole_core_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o, const Heads& mine,
                           const Sequence& sequence, const FusedGate& gate, const Tensor& dimportance,
                           const Tensor& dx, Into& into) const;
  void count_heads(Context& ctx, const Sequence& sequence, const Saved& s) const;
  Heads heads_of(Context& ctx, const Gathered& gathered, const Tensor& x, const Sequence& sequence,
                 const Saved& s) const;

  ParamStore& store_;
  int64_t layer_, heads_, head_dim_, hidden_size_;
  // In the order in which their parameters are registered.
  ParamStore::Id q_proj_, k_proj_, v_proj_;
  SwitchHeads k_switch_, v_switch_;
  AttentionGates gates_;
  ParamStore::Id o_proj_;
  Bias q_bias_, k_bias_, v_bias_, o_bias_;  // model.attention_bias
  QkPosition q_position_, k_position_;
  Core core_;
  Exclusive exclusive_;
  OutputTransform output_;
  InputProjections inputs_;  // q, k, v and, if gate_is_input_, the logits of the first gate
  bool gate_is_input_;
};
static_assert(Layer<Attention, Sequence>);

}  // namespace sluice
