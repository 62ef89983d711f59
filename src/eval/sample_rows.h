#pragma once
// Whole samples for evaluations; of these a rank computes a part where ranks share sequences
// (parallel.context).
#include <vector>

#include "nn/forward_buffers.h"
#include "nn/sequence_ranks.h"

namespace sluice {

/// Collective. Row `token` of those of all ranks that share sequences, (1, C), from rows (T, C) of every
/// rank, in t; without ranks that row itself.
Tensor row_of_all(Context& ctx, ScratchScope& t, const SequenceRanks* ranks, const Tensor& rows,
                  int64_t token);

class SampleRows {
 public:
  /// buffers: those of this rank's forward passes, which outlive this, as the model does.
  SampleRows(const Transformer& model, const ForwardBuffers& buffers);
  SampleRows(const SampleRows&) = delete;

  /// Of the samples together.
  int64_t tokens() const { return whole_.tokens.numel(); }
  /// Where the samples are written, on the host.
  const Batch& whole() const { return whole_; }
  /// A token of them; first_key counts among them all.
  void put(int64_t at, int32_t token, int32_t target, int64_t position, int64_t first_key) const;
  /// Gives this rank's part of the samples to the next forward pass.
  void upload(Context& ctx);

  /// After a forward pass and its losses, of every token. Collective where ranks share the samples, as all
  /// that follow.
  std::vector<double> losses(Context& ctx) const;
  /// The hidden state (1, C) of a token, in t where another rank may have it.
  Tensor hidden(Context& ctx, ScratchScope& t, int64_t token) const;
  /// What the first of the ranks that share the samples has found.
  int32_t agreed(int32_t found) const;

 private:
  const SequenceRanks* ranks_;
  const ForwardBuffers& buffers_;
  std::vector<int32_t> memory_, first_key_;
  Batch whole_;
};

}  // namespace sluice
