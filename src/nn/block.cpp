#include "nn/block.h"

#include "ops/elementwise.h"

namespace sluice {

Residual Block::forward(Context& ctx, const Residual& x, const Sequence& sequence, const RouterLoad& load,
                        Saved& s) const {
  attention_norm_.forward(ctx, x, s.attention_norm);
  attention_.forward(ctx, s.attention_norm.y, sequence, s.attention);
  attention_out_.forward(ctx, s.attention.y, s.attention_out);

  ffn_norm_.forward(ctx, Residual{s.x1, x.sum, s.attention_out.y}, s.ffn_norm);  // x1 = x + attention_out
  ffn_.forward(ctx, s.ffn_norm.y, load, s.ffn);
  ffn_out_.forward(ctx, s.ffn.y, s.ffn_out);
  return {s.y, s.x1, s.ffn_out.y};
}

void Block::backward(Context& ctx, Tensor d, const Tensor& x, const Sequence& sequence,
                     const RouterLoad& load, const Saved& s) const {
  ScratchScope t(ctx.scratch);
  // Where ranks share the sequence, keys and values travel during the feed-forward network's backward, up to
  // its own first exchange between ranks, if it has one (expert parallelism, determinism: exact).
  const Attention::Gathered gathered = attention_.begin_gather(ctx, t, sequence, s.attention);
  // d itself is the gradient of the residual path; the gradient through the branch is added to it.
  const Tensor dnorm = t.like("block.dnorm", d);
  const Tensor dbranch = ffn_out_.identity() ? d : t.like("block.dbranch", d);
  ffn_out_.backward(ctx, dbranch, d, s.ffn.y, s.ffn_out);
  ffn_.backward(ctx, dnorm, dbranch, s.ffn_norm.y, load, s.ffn);
  ffn_norm_.backward(ctx, d, dnorm, s.x1, s.ffn_norm, Into::add);

  attention_out_.backward(ctx, dbranch, d, s.attention.y, s.attention_out);
  attention_.backward(ctx, dnorm, dbranch, s.attention_norm.y, sequence, gathered, s.attention);
  attention_norm_.backward(ctx, d, dnorm, x, s.attention_norm, Into::add);
}

Block::Block(const ModelConfig& config, ParamStore& store, int64_t layer, const ExpertRanks& experts,
             int64_t sequence_ranks)
    : Block(config, store, layer, experts, sequence_ranks, "model.layers." + std::to_string(layer)) {}

Block::Block(const ModelConfig& config, ParamStore& store, int64_t layer, const ExpertRanks& experts,
             int64_t sequence_ranks, const std::string& name)
    : attention_norm_(config, store, name + ".input_layernorm"),
      attention_(config, store, name + ".self_attn", layer, sequence_ranks),
      attention_out_(config, store, name + ".post_attention_branch_layernorm.weight"),
      ffn_norm_(config, store, name + ".post_attention_layernorm"),
      ffn_(config, store, name + ".mlp", layer, experts),
      ffn_out_(config, store, name + ".post_mlp_branch_layernorm.weight") {}

Block::Saved Block::make_saved(Arena& arena, const std::string& name, int64_t T, DType dtype,
                               bool keep_inner) const {
  Saved s;
  s.attention = attention_.make_saved(arena, name + ".attention", T, dtype);
  const int64_t C = s.attention.y.dim(1);
  s.attention_norm = attention_norm_.make_saved(arena, name + ".attention_norm", dtype, T);
  s.attention_out = attention_out_.make_saved(arena, name + ".attention_out", s.attention.y);
  s.x1 = arena.alloc(name + ".x1", dtype, {T, C});
  s.ffn_norm = ffn_norm_.make_saved(arena, name + ".mlp_norm", dtype, T);
  s.ffn = ffn_.make_saved(arena, name + ".mlp", T, dtype, keep_inner);
  s.ffn_out = ffn_out_.make_saved(arena, name + ".mlp_out", s.ffn.y);
  s.y = arena.alloc(name + ".y", dtype, {T, C});
  return s;
}

Block::Saved Block::share_saved(Arena& arena, const std::string& name, const Saved& other) const {
  Saved s = other;
  s.y = arena.alloc(name + ".y", other.y.dtype, {other.y.dim(0), other.y.dim(1)});
  // The other block may be one of those without a window (model.attention.window_pattern).
  const SoftmaxAttention* const softmax = attention_.softmax();
  if (Tensor& first_key = s.attention.core.first_key; softmax && softmax->window() > 0 && !first_key)
    first_key = arena.alloc(name + ".attention.first_key", DType::i32, {other.y.dim(0)});
  return s;
}

BranchOutput::BranchOutput(const ModelConfig& config, ParamStore& store, const std::string& norm_name)
    : clip_(config.branch_clip) {
  if (config.norm_placement == NormPlacement::sandwich)
    norm_.emplace(config, store, norm_name, std::vector<int64_t>{config.hidden_size});
}

BranchOutput::Saved BranchOutput::make_saved(Arena& arena, const std::string& name, const Tensor& x) const {
  Saved s;
  s.clipped = clip_ ? arena.alloc(name + ".clipped", x.dtype, {x.dim(0), x.dim(1)}) : x;
  if (norm_) s.norm = norm_->make_saved(arena, name + ".norm", x.dtype, {x.dim(0), x.dim(1)});
  s.y = norm_ ? s.norm.y : s.clipped;
  return s;
}

void BranchOutput::forward(Context& ctx, const Tensor& x, Saved& s) const {
  if (clip_) clip_forward(ctx, s.clipped, x, *clip_);
  if (norm_) norm_->forward(ctx, s.clipped, s.norm);
}

void BranchOutput::backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x,
                            const Saved& s) const {
  if (norm_) norm_->backward(ctx, dx, dy, s.clipped, s.norm);
  if (clip_) clip_backward(ctx, dx, norm_ ? dx : dy, x, *clip_);
  if (identity() && dx.data != dy.data) cast(ctx, dx, dy);
}

}  // namespace sluice
