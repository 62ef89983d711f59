#include "nn/transformer.h"

#include "core/device.h"
#include "core/host_view.h"
#include "nn/init.h"
#include "nn/sequence_ranks.h"
#include "nn/weight_gradient.h"
#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/rope.h"

namespace sluice {
namespace {

/// How many tokens a pass has on all ranks that share its sequences.
int64_t of_all_ranks(const SequenceRanks* ranks, int64_t tokens) {
  return ranks ? ranks->split().ranks * tokens : tokens;
}

}  // namespace

Transformer::Transformer(const ModelConfig& config, ParamStore& store, const ExpertRanks& experts,
                         const SequenceRanks* sequences)
    : config_(config),
      store_(store),
      sequence_ranks_(sequences),
      dense_warm_up_(config.attention.sparse.phase == SparsePhase::dense_warm_up) {
  const int64_t V = config.vocab_size, C = config.hidden_size;
  SLUICE_CHECK(V > 0, "Transformer: vocab_size must be known, got {}", V);
  const bool tied = config.tie_word_embeddings;
  ParamSpec words{
      .name = "model.embed_tokens.weight", .shape = {V, C}, .init = embedding_init(config), .packed = tied};
  words.when_frozen = WhenFrozen::skipped;
  words.vocabulary = true;
  words.summed_by_products = tied;  // then the embedding's part
  embed_tokens_ = store.add(words);
  if (config.embedding_norm)
    embedding_norm_.emplace(config, store, "model.embed_norm.weight", std::vector<int64_t>{C});
  blocks_.reserve(static_cast<size_t>(config.num_hidden_layers));
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    store.begin_unit(static_cast<int>(layer) + 1);
    blocks_.emplace_back(config, store, layer, experts, sequences ? sequences->split().ranks : 1);
  }
  store.begin_unit(0);
  norm_.emplace(config, store, "model.norm.weight", std::vector<int64_t>{C});
  words.name = "lm_head.weight";
  words.init = head_init(config);
  words.packed = words.summed_by_products = true;
  lm_head_ = tied ? embed_tokens_ : store.add(words);
}

Flops Transformer::flops(int64_t seq_len) const {
  return product_flops(store_, lm_head_) + block_flops(seq_len, layers());
}

Flops Transformer::block_flops(int64_t seq_len, int64_t count) const {
  Flops sum;
  for (int64_t layer = 0; layer < count; ++layer) sum += blocks_[static_cast<size_t>(layer)].flops(seq_len);
  return sum;
}

void Transformer::forward(Context& ctx, const Batch& batch, Saved& s, const StepLoad& load,
                          KeyValueCache* cache, const ValueZeroing* zeroing) const {
  check_batch("Transformer::forward", batch, s, cache);
  Sequence tokens = sequence(batch, cache, &load, sequence_ranks_);
  // Over whole sequences keys are selected in backward once more, and counted there.
  if (sums_whole()) tokens.indexers = nullptr;
  tokens.zeroing = zeroing;
  ScratchScope t(ctx.scratch);
  if (cache && sequence_ranks_)
    tokens.own_key = sequence_ranks_->own_key_behind(ctx, t, cache->length, batch.tokens.dim(0));
  Sequence whole;
  if (sums_whole() && tokens.heads) {
    whole = whole_sequence(ctx, t, batch, load);
    tokens.whole = &whole;
  }
  const int64_t added = of_all_ranks(sequence_ranks_, batch.tokens.dim(0));
  if (cache && cache->first_key) {
    const Tensor kept = cache->first_key.rows(cache->length, added);
    if (sequence_ranks_)
      sequence_ranks_->gather_first_keys(ctx, kept, batch.first_key, tokens.own_key);
    else
      copy(ctx, kept, batch.first_key);
  }
  forward(ctx, batch, tokens, routers(load, batch), s);
  if (cache) cache->length += added;
}

void Transformer::forward_each(Context& ctx, const Batch& batch, Saved& s,
                               std::span<KeyValueCache* const> caches) const {
  const auto count = static_cast<int64_t>(caches.size());
  SLUICE_CHECK(count == batch.tokens.dim(0), "Transformer::forward_each: {} tokens and {} caches",
               batch.tokens.dim(0), count);
  for (const KeyValueCache* cache : caches) check_cache("Transformer::forward_each", *cache, 1);
  check_batch("Transformer::forward_each", batch, s, nullptr);
  Sequence tokens = sequence(batch, nullptr, nullptr, nullptr);  // every rank computes all of these tokens
  tokens.caches = caches;
  for (int64_t i = 0; i < count; ++i)
    if (const KeyValueCache& cache = *caches[static_cast<size_t>(i)]; cache.first_key)
      copy(ctx, cache.first_key.rows(cache.length, 1), batch.first_key.rows(i, 1));
  forward(ctx, batch, tokens, {}, s);
  for (KeyValueCache* cache : caches) ++cache->length;
}

void Transformer::forward(Context& ctx, const Batch& batch, const Sequence& tokens, const RouterLoad& load,
                          Saved& s) const {
  store_.begin_use(ctx, 0, Pass::forward);
  embedding_forward(ctx, s.tokens, batch.tokens, store_.value(embed_tokens_));
  if (embedding_norm_) embedding_norm_->forward(ctx, s.tokens, s.embedding_norm);
  Residual x = {.sum = s.embedded};
  for (size_t layer = 0; layer < blocks_.size(); ++layer) {
    const int unit = static_cast<int>(layer) + 1;
    store_.begin_use(ctx, unit, Pass::forward);
    x = blocks_[layer].forward(ctx, x, tokens, load, s.blocks[layer]);
    store_.end_use(ctx, unit, Pass::forward);
  }
  norm_->forward(ctx, x, s.final_norm);
}

void Transformer::backward(Context& ctx, Tensor dhidden, const Batch& batch, Saved& s,
                           const StepLoad& load) const {
  check_batch("Transformer::backward", batch, s, nullptr);
  ScratchScope t(ctx.scratch);
  Sequence whole, tokens = sequence(batch, nullptr, &load, sequence_ranks_);
  if (sums_whole()) {
    whole = whole_sequence(ctx, t, batch, load);
    tokens.whole = &whole;
  }
  const RouterLoad of_routers = routers(load, batch);
  const Tensor d = dhidden;  // becomes the gradient of the residual stream, layer by layer, in place
  const auto input = [&](size_t layer) { return layer == 0 ? s.embedded : s.blocks[layer - 1].y; };
  norm_->backward(ctx, d, dhidden, input(blocks_.size()), s.final_norm);
  for (size_t layer = blocks_.size(); layer-- > 0;) {
    const int unit = static_cast<int>(layer) + 1;
    store_.begin_use(ctx, unit, Pass::backward);
    // The shared activations are still the last layer's. What is computed again has been counted, and the
    // residual stream behind the layer is there.
    if (s.recompute == Recompute::block && layer + 1 < blocks_.size())
      blocks_[layer].forward(ctx, {.sum = input(layer)}, sequence(batch, nullptr, nullptr, sequence_ranks_),
                             {.targets = of_routers.targets, .sequences = of_routers.sequences},
                             s.blocks[layer]);
    blocks_[layer].backward(ctx, d, input(layer), tokens, of_routers, s.blocks[layer]);
    store_.end_use(ctx, unit, Pass::backward);
  }
  if (embedding_norm_) embedding_norm_->backward(ctx, d, d, s.tokens, s.embedding_norm);
  if (store_.trains(embed_tokens_))
    embedding_backward(ctx, store_.grad(embed_tokens_), summed_rows(ctx, t, store_, d),
                       summed_rows(ctx, t, store_, batch.tokens));
}

void Transformer::loss_forward(Context& ctx, Tensor losses, const Batch& batch, const Saved& s) const {
  cross_entropy_forward(ctx, losses, s.hidden, store_.linear(lm_head_), batch.targets, soft_cap());
}

void Transformer::loss_forward_backward(Context& ctx, Tensor losses, Tensor dhidden, const Batch& batch,
                                        const Saved& s, const Tensor& gradient_scale,
                                        const StepLoad& load) const {
  ScratchScope t(ctx.scratch);
  const TokenRows* const tokens = store_.token_rows();
  const Tensor all = tokens ? tokens->room(t, dhidden) : dhidden;
  const ParamStore::Sum sum = store_.next_sum(lm_head_);
  cross_entropy_forward_backward(ctx, losses, all, sum.to, summed_rows(ctx, t, store_, s.hidden),
                                 store_.linear(lm_head_), summed_rows(ctx, t, store_, batch.targets),
                                 gradient_scale, soft_cap(), load.logits, sum.into);
  if (tokens) tokens->take_own(ctx, dhidden, all);
  balance_heads(ctx, config_.attention.head_balance, load.heads);
}

void Transformer::logits(Context& ctx, Tensor logits, const Tensor& hidden) const {
  if (logits.dtype == hidden.dtype) {
    linear_forward(ctx, logits, hidden, store_.linear(lm_head_));
  } else {
    ScratchScope t(ctx.scratch);
    const Tensor narrow = t.alloc("logits", hidden.dtype, {logits.dim(0), logits.dim(1)});
    linear_forward(ctx, narrow, hidden, store_.linear(lm_head_));
    cast(ctx, logits, narrow);
  }
  if (soft_cap() > 0) soft_cap_forward(ctx, logits, logits, soft_cap());
}

void Transformer::allocate_tables(Context& ctx, Arena& arena, DType dtype, int64_t max_positions) {
  const auto allocate = [&](Tensor& cos, Tensor& sin, const std::string& name, int64_t width) {
    const DType table_dtype = accumulate_dtype(dtype);
    cos = arena.alloc(name + ".cos", table_dtype, {max_positions, width / 2});
    sin = arena.alloc(name + ".sin", table_dtype, {max_positions, width / 2});
    if (arena.measuring()) return;
    const RopeScalingConfig& scaling = config_.rope.scaling;
    HostView host_cos(ctx, cos, HostView::Content::uninitialized),
        host_sin(ctx, sin, HostView::Content::uninitialized);
    rope_table(
        host_cos.tensor(), host_sin.tensor(), config_.rope.theta,
        {.yarn = scaling.type == RopeScalingType::yarn,
         .factor = scaling.factor,
         .original_max_position_embeddings = static_cast<double>(scaling.original_max_position_embeddings),
         .beta_fast = scaling.beta_fast,
         .beta_slow = scaling.beta_slow,
         .truncate = scaling.truncate,
         .attention_factor = scaling.attention_factor});
    host_cos.write_back();
    host_sin.write_back();
  };
  allocate(rope_cos_, rope_sin_, "rope", config_.head_dim);
  const AttentionConfig& a = config_.attention;
  if (a.kind == AttentionKind::sparse && a.sparse.indexer.rope)
    allocate(index_cos_, index_sin_, "rope.indexer", a.sparse.indexer.head_dim);
}

Transformer::Saved Transformer::make_saved(Arena& arena, int64_t num_tokens, DType dtype,
                                           Recompute recompute) const {
  Saved s;
  s.recompute = recompute;
  if (embedding_norm_) {
    s.tokens = arena.alloc("tokens", dtype, {num_tokens, config_.hidden_size});
    s.embedding_norm =
        embedding_norm_->make_saved(arena, "embedded", dtype, {num_tokens, config_.hidden_size});
    s.embedded = s.embedding_norm.y;
  } else {
    s.tokens = s.embedded = arena.alloc("embedded", dtype, {num_tokens, config_.hidden_size});
  }
  for (size_t layer = 0; layer < blocks_.size(); ++layer) {
    const std::string name = "layers." + std::to_string(layer);
    // Layers alike share one set.
    size_t alike = 0;
    while (blocks_[alike].ffn().has_experts() != blocks_[layer].ffn().has_experts()) ++alike;
    s.blocks.push_back(
        recompute == Recompute::block && alike < layer
            ? blocks_[layer].share_saved(arena, name, s.blocks[alike])
            : blocks_[layer].make_saved(arena, name, num_tokens, dtype, recompute != Recompute::mlp));
  }
  s.final_norm = norm_->make_saved(arena, "hidden", dtype, {num_tokens, config_.hidden_size});
  s.hidden = s.final_norm.y;
  return s;
}

KeyValueCache Transformer::make_cache(Arena& arena, int64_t max_tokens, DType dtype) const {
  KeyValueCache cache;
  for (size_t layer = 0; layer < blocks_.size(); ++layer) {
    const std::string name = "layers." + std::to_string(layer);
    const auto alloc = [&](const char* what) {
      return arena.alloc(name + what, dtype, {max_tokens, config_.num_key_value_heads, config_.head_dim});
    };
    cache.keys.push_back(alloc(".cache.keys"));
    cache.values.push_back(alloc(".cache.values"));
    if (config_.attention.kind == AttentionKind::sparse)
      cache.index_keys.push_back(arena.alloc(name + ".cache.index_keys", dtype,
                                             {max_tokens, config_.attention.sparse.indexer.head_dim}));
  }
  if (!cache.index_keys.empty()) cache.first_key = arena.alloc("cache.first_key", DType::i32, {max_tokens});
  return cache;
}

std::vector<Tensor> Transformer::index_variances() const {
  std::vector<Tensor> all;
  for (const Block& block : blocks_)
    if (const SparseAttention* sparse = block.attention().sparse())
      if (const Tensor t = sparse->indexer().mean_variance()) all.push_back(t);
  return all;
}

Sequence Transformer::sequence(const Batch& batch, KeyValueCache* cache, const StepLoad* load,
                               const SequenceRanks* ranks) const {
  return {.positions = batch.positions,
          .first_key = batch.first_key,
          .rope_cos = rope_cos_,
          .rope_sin = rope_sin_,
          .cache = cache,
          .ranks = ranks,
          .own_key = ranks && !cache ? ranks->own_key(batch.first_key.dim(0)) : Tensor(),
          .heads = load && load->heads.totals ? &load->heads : nullptr,
          .targets = batch.targets,
          .index_cos = index_cos_,
          .index_sin = index_sin_,
          .dense_warm_up = dense_warm_up_,
          .indexers = load && load->indexers.sums ? &load->indexers : nullptr};
}

RouterLoad Transformer::routers(const StepLoad& load, const Batch& batch) {
  RouterLoad routers = load.routers;
  if (routers.totals) routers.targets = batch.targets;
  return routers;
}

Sequence Transformer::whole_sequence(Context& ctx, ScratchScope& t, const Batch& batch,
                                     const StepLoad& load) const {
  return sequence(sequence_ranks_->whole_batch(ctx, t, batch), nullptr, &load, nullptr);
}

void Transformer::check_batch(const char* what, const Batch& batch, const Saved& s,
                              const KeyValueCache* cache) const {
  const int64_t T = s.embedded.dim(0);
  check_tensor(what, "tokens", batch.tokens, DType::i32, {T});
  check_tensor(what, "positions", batch.positions, DType::i32, {T});
  check_tensor(what, "first_key", batch.first_key, DType::i32, {T});
  SLUICE_CHECK(!rope_cos_.empty(), "{}: allocate_tables was not called", what);
  if (cache) check_cache(what, *cache, of_all_ranks(sequence_ranks_, T));
}

void Transformer::check_cache(const char* what, const KeyValueCache& cache, int64_t tokens) const {
  SLUICE_CHECK(cache.keys.size() == blocks_.size(), "{}: the cache is another model's", what);
  const int64_t room = cache.keys.empty() ? tokens : cache.keys[0].dim(0) - cache.length;
  SLUICE_CHECK(tokens <= room, "{}: {} tokens, but the cache has room for {}", what, tokens, room);
}

}  // namespace sluice
