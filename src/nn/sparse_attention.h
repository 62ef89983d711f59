#pragma once
#include <cmath>
#include <optional>
#include <string>

#include "nn/attention_core.h"
#include "nn/indexer.h"
#include "nn/softmax_attention.h"
#include "ops/sparse_attention.h"

namespace sluice {

/// Attention over the keys that an indexer selects (model.attention.kind: sparse; ops/sparse_attention.h),
/// with sparse.sink a learned sink logit per head: y = sigmoid(lse - sink_h) o, followed by the gate. In the
/// dense warm-up (Sequence::dense_warm_up) it is attention over all keys, from which the indexer learns.
class SparseAttention {
 public:
  /// lse and z0 are over the selected keys. What SoftmaxAttention alone saves is empty.
  struct Saved : SoftmaxAttention::Saved {
    Indexer::Saved index = {};
    Selection selection = {};
  };

  /// `prefix`: prefix of the layer's parameter names. sequence_ranks: how many ranks share a sequence.
  SparseAttention(const ModelConfig& config, ParamStore& store, const std::string& prefix, int64_t layer,
                  int64_t sequence_ranks = 1);
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype, bool gated) const;

  /// The indexer reads heads.x.
  void forward(Context& ctx, const Heads& heads, const Sequence& sequence, const FusedGate& gate,
               Saved& s) const;
  void backward(Context& ctx, const AttentionGrads& grads, const Tensor& dy, const Heads& heads,
                const Sequence& sequence, const FusedGate& gate, const Tensor& dimportance,
                const Saved& s) const;
  /// The indexer's loss, where sequence.indexers asks for it: dx as Indexer::backward.
  void backward_input(Context& ctx, Tensor dx, Into& into, const Heads& heads, const Sequence& sequence,
                      const Saved& s) const;

  /// Of a token's selected pairs and of the indexer, on average over the positions of a sequence.
  Flops flops(int64_t seq_len) const;
  HeadGate head_gate(const Saved& s, const Tensor& first_key) const;
  /// (H): the learned sink logits; empty without them.
  Tensor sinks() const { return sinks_ ? store_.value(*sinks_) : Tensor(); }
  Tensor sink_logits(const Saved& /*s*/) const { return sinks(); }
  Tensor sink_value() const { return {}; }
  double weight(double logit, double lse) const { return std::exp(logit - lse); }
  double scale() const { return scale_; }
  const Indexer& indexer() const { return indexer_; }

 private:
  /// With what the indexer has projected.
  void attend(Context& ctx, const Heads& heads, const Sequence& sequence, const FusedGate& gate,
              const Saved& s) const;
  AttentionInputs inputs(const Heads& heads, const Sequence& sequence) const;

  ParamStore& store_;
  int64_t layer_, heads_, head_dim_, sequence_ranks_;
  double scale_;
  bool skip_first_, dense_;
  double loss_coefficient_;
  Indexer indexer_;
  std::optional<ParamStore::Id> sinks_;
};
static_assert(AttentionCore<SparseAttention>);

}  // namespace sluice
