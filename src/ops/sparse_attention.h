#pragma once
// Causal softmax attention over selected keys (GSA: arXiv 2601.15305, section 3; DSA: DeepSeek-V3.2-Exp,
// equation 2; README.md): ops/attention.h, with the sum over j in the set S_t of a query alone,
//   z_tj = scale <q_t, k_j>,   A = softmax over S_t,   o_t^h = sum over S_t of A_tj v_j
// Query heads [g H/G, (g+1) H/G) use the index set g of `keys`. Work grows with the selected pairs.
#include "ops/attention.h"
#include "ops/indexer.h"

namespace sluice {

/// z0: kNotSelected where the first visible key is not selected, whose attention is then 0.
constexpr double kNotSelected = -1e30;

/// out is overwritten, as attention_forward's. first_key of `in` is that of the selection.
void sparse_attention_forward(Context& ctx, const AttentionState& out, const AttentionInputs& in,
                              const Selection& keys);

/// As attention_backward, with A zero outside of the selection; coef0 has no effect where the first visible
/// key is not selected. dk and dv are summed by query in ascending order: the bits do not depend on threads.
void sparse_attention_backward(Context& ctx, const AttentionGrads& grads, const Tensor& d_o,
                               const AttentionInputs& in, const AttentionState& state, const Selection& keys,
                               const ScoreGrads& of_scores = {});

}  // namespace sluice
