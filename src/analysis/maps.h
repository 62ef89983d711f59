#pragma once
// Attention over the first tokens of a few sequences: maps (Gated Attention, figure 2) and the projection of
// each head's queries and keys to a plane (sink-aware paper, figure 3). Attention is recomputed from the
// tensors that backward reads: A_tj = exp(scale <q_t, k_j> - lse_t), times 1 - A_sink with a sink, so that a
// row sums to 1, or to 1 - A_sink.
#include <vector>

#include "core/context.h"
#include "nn/transformer.h"

namespace sluice {

class AttentionMaps {
 public:
  /// tokens: number of tokens per sequence.
  AttentionMaps(const Transformer& model, int64_t tokens);

  /// Adds one sequence of that many tokens after a forward pass; first_key is that of the batch. Collective
  /// where ranks share the sequences: the pass is over whole sequences then, of which the first tokens count.
  void add(Context& ctx, const Tensor& first_key, const Transformer::Saved& saved);

  int64_t tokens() const { return tokens_; }
  int64_t sequences() const { return sequences_; }
  /// (L, M, M): mean over heads and sequences. f32, like all arrays for plots.
  std::vector<float> mean() const;
  /// (L, H, M, M): every head, of the first sequence.
  const std::vector<float>& heads() const { return heads_; }

  struct Planes {
    std::vector<float> points;      // (L, heads, sequences x M, 2)
    std::vector<double> explained;  // (L, heads, 2): fractions of the variance
  };
  /// Queries (H heads) and keys (Hkv) as used in the scores, that is, normalised and rotated; each head has
  /// its own plane.
  Planes queries() const;
  Planes keys() const;

 private:
  struct Points {
    int64_t heads = 0;
    std::vector<std::vector<double>> of_head;  // (L x heads) of (sequences x M, D)
    void add(int64_t layer, const std::vector<double>& values, int64_t head_dim);
  };
  Planes planes(const Points& points) const;

  const Transformer* model_;
  int64_t tokens_, sequences_ = 0;
  std::vector<double> sum_;  // (L, M, M)
  std::vector<float> heads_;
  Points queries_, keys_;
};

}  // namespace sluice
