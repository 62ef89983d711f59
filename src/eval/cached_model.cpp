#include "eval/cached_model.h"

#include <algorithm>

#include "config/derived.h"
#include "core/host_view.h"
#include "eval/sample_rows.h"

namespace sluice {
namespace {

// The rest of a prompt passes in chunks of these sizes and of powers of two between them; the last one is
// padded.
constexpr int64_t kSmallChunk = CachedModel::kSharedTokens, kLargeChunk = 256;

}  // namespace

struct CachedModel::Pass {
  Arena activations, host;
  Context ctx;
  ForwardBuffers buffers;
  Tensor logits;  // (rows, V), or (1, V) of one row of a chunk
  int64_t mine;   // of the rows, this rank's

  struct Bytes {
    int64_t activations = 0, host = 0, scratch = 0;
  };
  Pass(const TrainedModel& trained, int64_t rows, bool each, const Bytes& bytes)
      : activations("activations", bytes.activations, trained.device()),
        host("host", bytes.host),
        ctx(bytes.scratch, trained.device()),
        mine(each || !trained.model().sequence_ranks()
                 ? rows
                 : rows / trained.model().sequence_ranks()->split().ranks) {
    buffers = make_forward_buffers(trained, activations, host, mine, Recompute::block);
    logits = activations.alloc("logits", accumulate_dtype(trained.dtype()),
                               {each ? rows : 1, trained.config().model.vocab_size});
  }
  Bytes used() const {
    return {activations.high_water(), host.high_water(), std::max<int64_t>(ctx.scratch.high_water(), 64)};
  }
  /// first_key: see take_part (nn/sequence_ranks.h) where ranks share the sequence.
  void set(int64_t row, int32_t token, int64_t position, int64_t first_key = 0) const {
    const Batch& batch = buffers.host;
    batch.tokens.as<int32_t>()[row] = token;
    batch.targets.as<int32_t>()[row] = -1;
    batch.positions.as<int32_t>()[row] = static_cast<int32_t>(position);
    batch.first_key.as<int32_t>()[row] = static_cast<int32_t>(first_key);
  }
};

CachedModel::CachedModel(const TrainedModel& trained, const Sizes& sizes) : trained_(trained), sizes_(sizes) {
  SLUICE_CHECK(sizes.context > 0 && sizes.sequences > 0 && sizes.chunk > 0,
               "CachedModel: {} sequences of {} tokens in chunks of {}", sizes.sequences, sizes.context,
               sizes.chunk);
  if (const int64_t positions = max_positions(trained.config()); sizes.context > positions)
    fail(ExitCode::usage,
         "a context of {} tokens is longer than the model's {} positions (model.max_position_embeddings, or "
         "data.seq_len)",
         sizes.context, positions);
  if (ranks()) {
    SLUICE_CHECK(ranks()->split().seq_len == kSharedTokens, "CachedModel: ranks share {} tokens, not {}",
                 ranks()->split().seq_len, kSharedTokens);
    sizes_.chunk = std::max(sizes_.chunk / kSharedTokens, int64_t{1}) * kSharedTokens;
  }
  sizes_.chunk = std::min(sizes_.chunk, (sizes_.context + kSmallChunk - 1) / kSmallChunk * kSmallChunk);
  const auto make = [&](Arena& arena) {
    std::vector<KeyValueCache> caches;
    for (int64_t i = 0; i < sizes_.sequences; ++i)  // with room for the padding of a prompt's last chunk
      caches.push_back(trained.model().make_cache(arena, sizes_.context + kSmallChunk, trained.dtype()));
    return caches;
  };
  Arena measure("cache", 0, trained.device());
  make(measure);
  memory_ = std::make_unique<Arena>("cache", measure.high_water(), trained.device());
  caches_ = make(*memory_);
}
CachedModel::~CachedModel() = default;

int64_t CachedModel::cache_bytes() const { return memory_->high_water(); }

int64_t CachedModel::cache_bytes_per_token() const {
  return cache_bytes() / (sizes_.sequences * (sizes_.context + kSmallChunk));
}

int64_t CachedModel::activation_bytes() const {
  int64_t bytes = 0;
  for (const auto* passes : {&chunks_, &steps_})
    for (const auto& [rows, pass] : *passes)
      bytes += pass->activations.high_water() + pass->ctx.scratch.high_water();
  return bytes;
}

void CachedModel::truncate(int64_t sequence, int64_t length) {
  KeyValueCache& cache = caches_.at(static_cast<size_t>(sequence));
  SLUICE_CHECK(length >= 0 && length <= cache.length, "CachedModel: {} of {} tokens are kept", length,
               cache.length);
  cache.length = length;
}

void CachedModel::copy_sequence(int64_t from, int64_t to) {
  const KeyValueCache& source = caches_.at(static_cast<size_t>(from));
  KeyValueCache& copied = caches_.at(static_cast<size_t>(to));
  copied.length = source.length;
  if (source.length == 0 || from == to) return;
  Context& ctx = pass(1, ranks() != nullptr).ctx;
  written_.await(ctx);
  for (size_t layer = 0; layer < source.keys.size(); ++layer) {
    copy(ctx, copied.keys[layer].rows(0, source.length), source.keys[layer].rows(0, source.length));
    copy(ctx, copied.values[layer].rows(0, source.length), source.values[layer].rows(0, source.length));
  }
  for (size_t layer = 0; layer < source.index_keys.size(); ++layer)
    copy(ctx, copied.index_keys[layer].rows(0, source.length),
         source.index_keys[layer].rows(0, source.length));
  if (source.first_key)
    copy(ctx, copied.first_key.rows(0, source.length), source.first_key.rows(0, source.length));
  synchronize(ctx);
}

/// Measured with full caches, since attention's scratch memory may depend on the number of keys.
CachedModel::Pass& CachedModel::pass(int64_t rows, bool each) {
  std::unique_ptr<Pass>& made = (each ? steps_ : chunks_)[rows];
  if (made) return *made;
  Pass dry(trained_, rows, each, {});
  Arena nothing("cache", 0, trained_.device());
  const Transformer& model = trained_.model();
  if (each) {
    std::vector<KeyValueCache> caches;
    for (int64_t i = 0; i < rows; ++i)
      caches.push_back(model.make_cache(nothing, sizes_.context + kSmallChunk, trained_.dtype()));
    std::vector<KeyValueCache*> all;
    for (KeyValueCache& cache : caches) {
      cache.length = sizes_.context - 1;
      all.push_back(&cache);
    }
    model.forward_each(dry.ctx, dry.buffers.batch, dry.buffers.saved, all);
  } else {
    KeyValueCache cache = model.make_cache(nothing, sizes_.context + kSmallChunk, trained_.dtype());
    cache.length = sizes_.context + kSmallChunk - rows;
    model.forward(dry.ctx, dry.buffers.batch, dry.buffers.saved, {}, &cache);
  }
  const Tensor& hidden = dry.buffers.saved.hidden;
  ScratchScope t(dry.ctx.scratch);
  model.logits(dry.ctx, dry.logits, each ? hidden.rows(0, rows) : row_of_all(dry.ctx, t, ranks(), hidden, 0));
  made = std::make_unique<Pass>(trained_, rows, each, dry.used());
  return *made;
}

std::span<const float> CachedModel::read_logits(Pass& pass) {
  const HostView view(pass.ctx, pass.logits);
  synchronize(pass.ctx);
  const Tensor& logits = view.tensor();
  logits_.resize(static_cast<size_t>(logits.numel()));
  for (size_t i = 0; i < logits_.size(); ++i)
    logits_[i] =
        logits.dtype == DType::f64 ? static_cast<float>(logits.as<double>()[i]) : logits.as<float>()[i];
  if (ranks())  // whatever rounding differs between machines, they continue with the same tokens
    ranks()->ranks().broadcast(logits_.data(), std::ssize(logits_) * static_cast<int64_t>(sizeof(float)), 0);
  return logits_;
}

/// tokens: at most as many as the pass has rows; the rest is padding, which stands behind them and is then
/// forgotten.
void CachedModel::forward_chunk(Pass& pass, KeyValueCache& cache, std::span<const int32_t> tokens) {
  const int64_t first = cache.length, count = std::ssize(tokens), last = max_positions(trained_.config()) - 1;
  for (int64_t row = 0; row < pass.mine; ++row) {
    const int64_t i = ranks() ? ranks()->split().token_of(row) : row;
    pass.set(row, i < count ? tokens[static_cast<size_t>(i)] : 0, std::min(first + i, last),
             ranks() ? row - (first + i) : 0);
  }
  pass.buffers.upload(pass.ctx);
  written_.await(pass.ctx);
  trained_.model().forward(pass.ctx, pass.buffers.batch, pass.buffers.saved, {}, &cache);
  written_.set(pass.ctx);
  cache.length = first + count;
}

/// Chunks end at multiples of their size, wherever the tokens begin: whole ones, then smaller and smaller
/// ones, so that the rest of a prompt is not many small products.
int64_t CachedModel::rows_of_chunk(int64_t length, int64_t left) const {
  const auto fits = [&](int64_t rows) { return left >= rows && length % rows == 0; };
  if (fits(sizes_.chunk)) return sizes_.chunk;
  for (int64_t rows = kLargeChunk; rows > kSmallChunk; rows /= 2)
    if (rows < sizes_.chunk && fits(rows)) return rows;
  return kSmallChunk;
}

std::span<const float> CachedModel::prefill(int64_t sequence, std::span<const int32_t> tokens) {
  KeyValueCache& cache = caches_.at(static_cast<size_t>(sequence));
  SLUICE_CHECK(!tokens.empty() && cache.length + std::ssize(tokens) <= sizes_.context,
               "CachedModel: {} tokens behind {} of at most {}", tokens.size(), cache.length, sizes_.context);
  for (;;) {
    const auto left = static_cast<int64_t>(tokens.size());
    if (left == 1 && ranks()) return step(std::vector<Next>{{sequence, tokens[0]}});
    const int64_t rows = left == 1 ? 1 : rows_of_chunk(cache.length, left);
    const int64_t count = std::min(left, rows - cache.length % rows);
    Pass& chunk = pass(rows, false);
    forward_chunk(chunk, cache, tokens.first(static_cast<size_t>(count)));
    tokens = tokens.subspan(static_cast<size_t>(count));
    if (!tokens.empty()) continue;
    ScratchScope t(chunk.ctx.scratch);
    trained_.model().logits(chunk.ctx, chunk.logits,
                            row_of_all(chunk.ctx, t, ranks(), chunk.buffers.saved.hidden, count - 1));
    return read_logits(chunk);
  }
}

std::span<const float> CachedModel::step(std::span<const Next> next) {
  const auto count = static_cast<int64_t>(next.size());
  Pass& each = pass(count, true);
  stepping_.clear();
  for (int64_t i = 0; i < count; ++i) {
    const Next& n = next[static_cast<size_t>(i)];
    KeyValueCache& cache = caches_.at(static_cast<size_t>(n.sequence));
    SLUICE_CHECK(cache.length < sizes_.context, "CachedModel: sequence {} is full", n.sequence);
    stepping_.push_back(&cache);
    each.set(i, n.token, cache.length);
  }
  each.buffers.upload(each.ctx);
  written_.await(each.ctx);
  trained_.model().forward_each(each.ctx, each.buffers.batch, each.buffers.saved, stepping_);
  written_.set(each.ctx);
  trained_.model().logits(each.ctx, each.logits, each.buffers.saved.hidden);
  return read_logits(each);
}

}  // namespace sluice
