#pragma once
// The router of a mixture of experts, and its losses. For T tokens, E experts, K experts per token:
//   logits = x W^T (E),  p = softmax(logits),  lse = log sum exp(logits)
//   experts_k: the K largest p of a token, largest first, ties to the lower index
//   weights_k = p of experts_k, or that divided by the sum over the K (norm_topk_prob)
//   balance loss = E sum_e f_e P_e with token fractions f_e = counts_e / sum counts and P_e = mean of p_e
//   over
//     the tokens (Switch Transformer, Fedus et al. 2021, eq. 4-6; counts of the whole batch: Qiu et al. 2025,
//     "Demons in the Detail", eq. 4-6). It is 1 at balance. counts are constants: only p has a gradient.
//   z-loss = mean over the tokens of lse^2 (ST-MoE, Zoph et al. 2022, eq. 5)
// Logits and everything computed from them have accumulate_dtype(x): f32 for f32 and bf16.
#include "core/kinds.h"
#include "ops/linear.h"

namespace sluice {

/// logits (T, E) = x (T, C) weight (E, C)^T, overwritten; in f32 (f64) for any storage type. weight as for
/// linear_*.
void router_logits_forward(Context& ctx, Tensor logits, const Tensor& x, const LinearWeight& weight);
/// dx (T, C) = or += dlogits (T, E) weight; dweight (E, C) of accumulate_dtype(x) += dlogits^T x. On a GPU
/// dlogits are rounded to the storage type for both products.
void router_logits_backward(Context& ctx, Tensor dx, Tensor dweight, const Tensor& dlogits, const Tensor& x,
                            const LinearWeight& weight, Into into);

/// probabilities (T, E), which may be logits; lse (T); weights (T, K); experts (T, K) i32: all overwritten. A
/// row of logits that is not finite gives weights that are not finite and any K distinct experts.
void route_forward(Context& ctx, Tensor probabilities, Tensor lse, Tensor weights, Tensor experts,
                   const Tensor& logits, bool norm_topk_prob);

/// Factors of the gradients of each token's losses: balance and z, each times token_weight.
struct RouterLossScale {
  double balance = 0, z = 0;
  Tensor token_weight = {};  // (1) f64; empty: 1
};

/// dlogits (T, E), which may be probabilities, is overwritten with the gradients from dweights (T, K), from
/// the balance loss with `counts` (E) f64, and from the z-loss:
///   dlogit_e = p_e (dp_e - sum_i dp_i p_i) + balance E p_e (f_e - sum_i f_i p_i) + z 2 lse p_e
/// Padding has no losses: ops/padding.h removes what this gives its rows.
void route_backward(Context& ctx, Tensor dlogits, const Tensor& dweights, const Tensor& probabilities,
                    const Tensor& lse, const Tensor& weights, const Tensor& experts, const Tensor& counts,
                    bool norm_topk_prob, const RouterLossScale& scale);

/// Columns of a router's totals: E counts of (token, expert) pairs, E sums of p over the tokens, the sum over
/// batches of T x balance loss of the single batch, the sum of lse^2, the number of tokens.
constexpr int64_t router_totals_size(int64_t num_experts) { return 2 * num_experts + 3; }

/// counts (E) f64 is overwritten with the number of tokens of this batch per expert, from offsets (E + 1) i32
/// (ops/permute.h). totals (router_totals_size(E)) f64 += those of this batch, in a deterministic order; it
/// may be empty. targets (T) i32, with experts (T, K) i32 of route_forward: tokens with target kPadding
/// (core/targets.h) are left out of all of these. Without targets there is no padding.
void router_load(Context& ctx, Tensor counts, Tensor totals, const Tensor& offsets,
                 const Tensor& probabilities, const Tensor& lse, const Tensor& experts = {},
                 const Tensor& targets = {});

}  // namespace sluice
