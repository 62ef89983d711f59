#pragma once
// Balance of attention heads (ops/head_importance.h): the sums of a step over its micro-batches, and the
// mechanism that measures a head's importance.
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"
#include "ops/head_importance.h"

namespace sluice {

/// The sums of a step's heads and the gradients of a micro-batch's loss (model.attention.head_balance). L
/// layers, H heads. Attention's forward fills a layer's rows; balance_heads computes the gradients that its
/// backward reads.
struct HeadLoad {
  Tensor totals = {};         // (L, head_row_size(H)) f64: the step's so far, of this rank. Empty: nothing is
                              // counted, and no loss
  Tensor batch = {};          // the same: this micro-batch's
  Tensor dimportance = {};    // (L, H) f64: the gradient of every single token's gate of a head
  double token_fraction = 1;  // of the global batch's tokens, in this micro-batch
  /// (L, head_row_size(H)) f64, sums over ranks: of the step before, with scope previous_step; of this step,
  /// where `ranks` are asked.
  Tensor reduced = {};
  Tensor shared =
      {};  // (L, H) f64: 1 for heads that are left out; empty: the most important ones of `reduced`
  /// The ranks that compute micro-batches of the same step, if the scope needs them, and, on a GPU, host
  /// memory like `reduced` for their sums.
  Communicator* ranks = nullptr;
  Tensor host_reduced = {};

  Tensor row(const Tensor& rows, int64_t layer) const { return rows.rows(layer, 1).view({rows.dim(1)}); }
  Tensor gradient(int64_t layer) const { return dimportance.rows(layer, 1).view({dimportance.dim(1)}); }
};

/// Allocates a load; empty if the coefficient is 0. ranks: all ranks that compute the step, or nullptr;
/// sequences: those of them that share the sequences of a micro-batch. `host_memory` is used only if `memory`
/// is on a GPU.
HeadLoad make_head_load(const ModelConfig& config, Arena& memory, Arena& host_memory, Communicator* ranks,
                        Communicator* sequences = nullptr);

/// Between forward and backward: dimportance and the loss of the scope, from batch and totals. With scope
/// micro_batch importance is this micro-batch's mean, over all ranks that share its sequences; data_parallel:
/// that of the micro-batches that ranks compute at this time, which gives the exact gradient of their joint
/// loss; global_batch: that of the step so far; previous_step: that of the step before, 0 in the first.
void balance_heads(Context& ctx, const HeadBalanceConfig& config, const HeadLoad& load);

/// A layer's imbalance (equation 6 of arXiv 2602.01203): standard deviation of its heads' importance, with
/// ddof 1 or 0, over its mean. None where it says nothing: not more heads than ddof, no tokens, or closed
/// heads, whose mean importance is below kLeastImportance.
std::optional<double> imbalance_of(const std::vector<double>& importance, int64_t ddof);

}  // namespace sluice
