#pragma once
#include <optional>
#include <string>

#include "nn/attention.h"
#include "nn/feed_forward.h"
#include "nn/gated_norm.h"

namespace sluice {

/// Post-processing of a branch's output before the residual addition: clamping to [-branch_clip,
/// branch_clip], then, with norm_placement sandwich, normalisation of the clamped output.
class BranchOutput {
 public:
  struct Saved {
    Tensor clipped;       // (T, C); x itself without branch_clip
    RmsNorm::Saved norm;  // y (T, C); empty without sandwich
    Tensor y;             // (T, C): added to the residual stream; x itself without both
  };

  BranchOutput(const ModelConfig& config, ParamStore& store, const std::string& norm_name);
  /// True without clip and norm, when s.y is x.
  bool identity() const { return !clip_ && !norm_; }
  /// x: the branch's output.
  Saved make_saved(Arena& arena, const std::string& name, const Tensor& x) const;
  void forward(Context& ctx, const Tensor& x, Saved& s) const;
  /// dx overwritten, may alias dy.
  void backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& x, const Saved& s) const;

 private:
  std::optional<double> clip_;
  std::optional<RmsNorm> norm_;
};
static_assert(Layer<BranchOutput>);

/// One decoder layer: x1 = x + branch(attention(norm(x))), y = x1 + branch(ffn(norm(x1))).
class Block {
 public:
  struct Saved {
    GatedNorm::Saved attention_norm;    // y (T, C): input of attention and its gates
    Attention::Saved attention;         // y (T, C)
    BranchOutput::Saved attention_out;  // y (T, C): added to the residual stream
    Tensor x1;                          // (T, C): residual stream after attention
    GatedNorm::Saved ffn_norm;          // y (T, C)
    FeedForward::Saved ffn;             // y (T, C)
    BranchOutput::Saved ffn_out;        // y (T, C): added to the residual stream
    Tensor y;                           // (T, C): residual stream after the block, x1 + ffn_out.y
  };

  /// sequence_ranks: how many ranks share a sequence.
  Block(const ModelConfig& config, ParamStore& store, int64_t layer, const ExpertRanks& experts = {},
        int64_t sequence_ranks = 1);
  Saved make_saved(Arena& arena, const std::string& name, int64_t num_tokens, DType dtype,
                   bool keep_inner) const;
  /// Activations shared with another block, but with a separate output, which is all that recompute=block
  /// keeps of a layer.
  Saved share_saved(Arena& arena, const std::string& name, const Saved& other) const;

  /// s.y from x (T, C), except for the last addition, which is left to the norm that reads s.y first: of the
  /// next block, or behind the last one.
  Residual forward(Context& ctx, const Residual& x, const Sequence& sequence, const RouterLoad& load,
                   Saved& s) const;
  /// d (T, C) is the gradient of the residual stream: of s.y on entry, of x on return.
  void backward(Context& ctx, Tensor d, const Tensor& x, const Sequence& sequence, const RouterLoad& load,
                const Saved& s) const;

  Flops flops(int64_t seq_len) const {
    return attention_norm_.flops() + attention_.flops(seq_len) + ffn_norm_.flops() + ffn_.flops();
  }
  const Attention& attention() const { return attention_; }
  const FeedForward& ffn() const { return ffn_; }

 private:
  Block(const ModelConfig& config, ParamStore& store, int64_t layer, const ExpertRanks& experts,
        int64_t sequence_ranks, const std::string& name);

  GatedNorm attention_norm_;
  Attention attention_;
  BranchOutput attention_out_;
  GatedNorm ffn_norm_;
  FeedForward ffn_;
  BranchOutput ffn_out_;
};

}  // namespace sluice
