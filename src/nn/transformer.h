#pragma once
// The decoder-only transformer: embedding, blocks, final norm, head. Hugging Face names (Qwen3 layout plus
// gate_proj, sinks, o_norm and the sandwich norms).
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "config/config.h"
#include "nn/batch.h"
#include "nn/block.h"
#include "nn/rmsnorm.h"
#include "nn/step_losses.h"
#include "params/param_store.h"

namespace sluice {

class Transformer {
 public:
  /// What backward, and analysis, need from forward.
  struct Saved {
    Recompute recompute = Recompute::none;
    Tensor tokens;  // (T, C): the embedding's rows, before its norm; without one, embedded
    RmsNorm::Saved embedding_norm;
    Tensor embedded;  // (T, C), input of block 0
    std::vector<Block::Saved>
        blocks;  // one per layer; with recompute=block those alike share one set of activations but `y`
    RmsNorm::Saved final_norm;
    Tensor hidden;  // (T, C): the final norm's output, input of the head
  };

  /// experts: the ranks that share the experts, or none: all are here. sequences: those that share every
  /// sequence, so that a batch holds this rank's part of it; or none, nullptr.
  Transformer(const ModelConfig& config, ParamStore& store, const ExpertRanks& experts = {},
              const SequenceRanks* sequences = nullptr);

  /// max_positions rows of the rotary table; shared by all blocks.
  void allocate_tables(Context& ctx, Arena& arena, DType dtype, int64_t max_positions);
  Saved make_saved(Arena& arena, int64_t num_tokens, DType dtype, Recompute recompute) const;

  /// Fills s up to s.hidden. cache: keys and values of earlier tokens of one sequence (generation); batch
  /// holds the next ones, with positions and first_key counted from the sequence's start. nullptr in
  /// training. load: what the routers of layers with experts, and attention's heads, add to.
  /// zeroing: what is evaluated is not quite the model; without a cache.
  void forward(Context& ctx, const Batch& batch, Saved& s, const StepLoad& load = {},
               KeyValueCache* cache = nullptr, const ValueZeroing* zeroing = nullptr) const;
  /// One token of each of several sequences: row i of batch, with its position in its sequence and first_key
  /// 0, is appended to caches[i], all of them different.
  void forward_each(Context& ctx, const Batch& batch, Saved& s, std::span<KeyValueCache* const> caches) const;
  /// losses (T), nats, from s.hidden.
  void loss_forward(Context& ctx, Tensor losses, const Batch& batch, const Saved& s) const;
  /// All losses of a micro-batch and where their gradients begin: losses as loss_forward, with dhidden (T, C)
  /// and the head's gradient, every token's multiplied by gradient_scale (1) f64; and those of `load`, which
  /// forward has added to. Where the store sums over whole sequences (ParamStore::sum_whole), losses are
  /// those of the tokens of all ranks that share them, and so are the squares of load.logits.
  void loss_forward_backward(Context& ctx, Tensor losses, Tensor dhidden, const Batch& batch, const Saved& s,
                             const Tensor& gradient_scale, const StepLoad& load = {}) const;
  /// Adds every parameter's gradient, those of load's losses included. dhidden is used up.
  void backward(Context& ctx, Tensor dhidden, const Batch& batch, Saved& s, const StepLoad& load = {}) const;
  /// logits (R, V) f32 (f64) of rows of hidden (R, C).
  void logits(Context& ctx, Tensor logits, const Tensor& hidden) const;

  /// Whether attention of kind sparse sees all keys (model.attention.sparse.phase, phase_steps).
  void set_dense_warm_up(bool dense) { dense_warm_up_ = dense; }
  bool dense_warm_up() const { return dense_warm_up_; }
  /// The running means of the variance of every layer's index scores (nn/indexer_loss.h); empty unless the
  /// number of selected keys adapts to it.
  std::vector<Tensor> index_variances() const;

  KeyValueCache make_cache(Arena& arena, int64_t max_tokens, DType dtype) const;

  /// Of a token of a sequence of seq_len, on average over its positions: of blocks and head. The look-up of
  /// the embedding is no product.
  Flops flops(int64_t seq_len) const;
  /// Likewise of the first `count` blocks alone.
  Flops block_flops(int64_t seq_len, int64_t count) const;
  int64_t layers() const { return static_cast<int64_t>(blocks_.size()); }
  const ModelConfig& config() const { return config_; }
  const std::vector<Block>& blocks() const { return blocks_; }
  /// nullptr where a sequence is computed by one rank.
  const SequenceRanks* sequence_ranks() const { return sequence_ranks_; }

 private:
  void forward(Context& ctx, const Batch& batch, const Sequence& tokens, const RouterLoad& load,
               Saved& s) const;
  /// Refers to *load, if there is one.
  Sequence sequence(const Batch& batch, KeyValueCache* cache, const StepLoad* load,
                    const SequenceRanks* ranks) const;
  /// Whether ranks share sequences, and sums over tokens are those of one rank (params/token_rows.h).
  bool sums_whole() const { return store_.token_rows(); }
  /// load.routers with the batch's targets, if anything is counted.
  static RouterLoad routers(const StepLoad& load, const Batch& batch);
  Sequence whole_sequence(Context& ctx, ScratchScope& t, const Batch& batch, const StepLoad& load) const;
  void check_cache(const char* what, const KeyValueCache& cache, int64_t tokens) const;
  void check_batch(const char* what, const Batch& batch, const Saved& s, const KeyValueCache* cache) const;

  double soft_cap() const { return config_.final_logit_softcapping.value_or(0); }

  ModelConfig config_;
  ParamStore& store_;
  const SequenceRanks* sequence_ranks_;
  ParamStore::Id embed_tokens_ = 0, lm_head_ = 0;
  std::optional<RmsNorm> embedding_norm_, norm_;
  Tensor rope_cos_, rope_sin_;
  Tensor index_cos_, index_sin_;  // of the indexers, with rope
  bool dense_warm_up_;
  std::vector<Block> blocks_;
};

}  // namespace sluice
