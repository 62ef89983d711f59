#pragma once
#include <optional>
#include <string>

#include "nn/flops.h"
#include "nn/indexer_loss.h"
#include "nn/rmsnorm.h"
#include "nn/sequence.h"
#include "ops/indexer.h"

namespace sluice {

/// The indexer of a sparse attention layer (ops/indexer.h): projections of the layer's input (the
/// pre-normalised hidden state) to queries of J heads, one key per token and the logits of the heads'
/// weights. Biases start at 0. J heads of width d, C hidden.
class Indexer {
 public:
  struct Saved {
    Tensor q;               // (T, J, d): rotated with rope
    Tensor projected;       // (T, d): the key projection
    RmsNorm::Saved k_norm;  // y (T, d); empty without key_norm
    Tensor k;               // (T, d): normalised, rotated; `projected` itself without both
    Tensor means;  // (T, d): k, or means of blocks; with block > 1 unused where ranks share a sequence
    Tensor w;      // (T, J): logits of the head weights, or empty
  };
  /// What queries choose from: of this rank's tokens, or of those of all ranks that share the sequence.
  struct Keys {
    Tensor means;      // (Tk, d)
    Tensor first_key;  // (Tk) i32, counted among these tokens; empty with block = 1 and several ranks
  };

  /// `prefix`: prefix of the parameter names, "<layer>.indexer".
  Indexer(const ModelConfig& config, ParamStore& store, const std::string& prefix);
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype) const;

  /// Queries, keys and head weights of s from x (T, C).
  void project(Context& ctx, const Tensor& x, const Sequence& sequence, Saved& s) const;
  /// What is chosen from: with a KV cache, s.k becomes the keys of all of its tokens, in the layer's part of
  /// it; else the means of blocks.
  void keep(Context& ctx, const Sequence& sequence, int64_t layer, Saved& s) const;
  /// The chosen keys of s, for queries (T) among keys (Tk); `sums` as select_keys.
  void select(Context& ctx, const Selection& out, const Sequence& sequence, const Saved& s,
              const Tensor& sums) const;
  /// Adds the loss of this layer to load.row(layer) and its gradients to the parameters'; dx (T, C) is
  /// written according to `into` unless the input is detached. selection: nullptr for all keys.
  void backward(Context& ctx, Tensor dx, Into& into, const Tensor& x, const Sequence& sequence,
                const IndexTarget& target, const Selection* selection, int64_t layer, const Saved& s) const;

  /// Collective with ranks (Sequence::ranks), whose keys are then gathered into t. first_key (T) as a
  /// batch's.
  Keys keys(Context& ctx, ScratchScope& t, const SequenceRanks* ranks, const Tensor& first_key,
            const Saved& s) const;
  /// What the scores of queries are made from; own_key (T) with the keys of several ranks.
  IndexInputs inputs(const Saved& s, const Tensor& keys, const Tensor& first_key,
                     const Tensor& own_key = {}) const;
  /// Of the distribution over keys that the loss compares with attention's.
  double temperature(Context& ctx) const;
  Budget budget() const;
  int64_t sets() const { return sets_; }
  int64_t block() const { return config_.block; }
  /// (1): the running mean of the scores' variance (IndexerLossState); empty unless k adapts to it.
  Tensor mean_variance() const { return mean_variance_ ? store_.value(*mean_variance_) : Tensor(); }
  /// Of a token: the projections, and the products with the keys that it chooses from, `selected` of which
  /// the loss differentiates (the others are computed in forward alone).
  Flops flops(double candidates, double selected) const;

 private:
  Tensor value(const std::optional<ParamStore::Id>& id) const { return id ? store_.value(*id) : Tensor(); }
  Tensor grad(const std::optional<ParamStore::Id>& id) const { return id ? store_.grad(*id) : Tensor(); }

  SparseConfig config_;
  ParamStore& store_;
  int64_t sets_, layers_;
  std::string prefix_;
  ParamStore::Id q_proj_, k_proj_;
  std::optional<ParamStore::Id> w_proj_, bias_, w_bias_, log_temperature_, mean_variance_;
  std::optional<RmsNorm> k_norm_;
};

}  // namespace sluice
