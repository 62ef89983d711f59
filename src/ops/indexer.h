#pragma once
// The indexer of sparse attention: scores of keys, exact selection, and the loss that trains it. (GSA: arXiv
// 2601.15305, equations 7, 8, 14 and 15; DSA: DeepSeek-V3.2-Exp, equations 1, 3 and 4. README.md.)
//   u_tsj = scale <q_tj, k_s> + bias_j,   I_ts = sum_j a_tj act(u_tsj),   a_tj = sigmoid(w_tj + c_j), w_tj +
//   c_j or 1
// Tq query tokens, Tk >= Tq key tokens, the queries the last Tq of them, or with own_key any of them; J index
// heads of width d, one key per token. G index sets per query: set g belongs to the index heads [g J/G, (g+1)
// J/G) and to the query heads [g H/G, (g+1) H/G) of attention. Everything is computed in accumulate_dtype(q).
//
// Keys are selected in blocks of b tokens, counted from first_key_t. Block 1: the candidates of query t are
// all visible keys. Block b > 1: they are the blocks that lie wholly before the query's own block, scored by
// the mean of their keys, which block_means leaves in the row of the block's first token; the own block is
// seen up to t itself, and has no score. Nothing of size Tq x Tk is stored; scores live for 32 queries at a
// time.
#include "core/context.h"
#include "core/kinds.h"

namespace sluice {

/// The inputs of the scores.
struct IndexInputs {
  Tensor q;            // (Tq, J, d)
  Tensor k;            // (Tk, d): keys, or means of blocks
  Tensor w = {};       // (Tq, J): logits of the head weights; empty: 1
  Tensor bias = {};    // (J) of q's dtype, or empty
  Tensor w_bias = {};  // (J), or empty
  Tensor first_key;    // (Tq) i32, as in ops/attention.h
  double scale = 1;
  int64_t sets = 1;   // G
  int64_t block = 1;  // b
  IndexActivation activation = IndexActivation::sigmoid;
  IndexHeadWeights head_weights = IndexHeadWeights::sigmoid;
  Tensor own_key = {};  // (Tq) i32, as in ops/attention.h, with which first_key is relative; or empty
};

/// The keys that every query attends to. Rows (g, t) of `first` hold the first tokens of the chosen blocks in
/// ascending order, the own one (b > 1) last; a block ends after b tokens or at t.
struct Selection {
  Tensor first;      // (G, Tq, room) i32
  Tensor count;      // (G, Tq) i32: valid entries of a row
  Tensor first_key;  // (Tq) i32
  int64_t block = 1;

  /// Whether query t, of set `set`, attends to key s, which is not after its own. On the host.
  bool contains(int64_t set, int64_t t, int64_t s) const;
};
/// Entries per row that are enough for at most `most` selected blocks among Tk tokens.
constexpr int64_t selection_room(int64_t most, int64_t tokens, int64_t block) {
  const int64_t blocks = (tokens + block - 1) / block;
  return (most < blocks ? most : blocks) + (block > 1);
}

/// How many blocks query t selects among its n candidates: min(n, clamp(k_t, min, max)), where k_t is base
/// (fixed), or with the population variance V_t of its scores, its running mean m over training and
/// r = V_t / m: base r (eq8), base / r (inverse), base (0.5 + 1 / (1 + temperature r)) (code); or, with the
/// entropy E of softmax(I_t), base (0.5 + temperature E / log(n + 1)) (entropy); rounded down. While m is
/// unknown (0), k_t is base. With an infinite score V_t is infinite, and E is 0 if the largest score is
/// infinite.
struct Budget {
  BudgetPolicy policy = BudgetPolicy::fixed;
  int64_t base = 0, min = 1, max = 0;
  double temperature = 1;
  bool force_self = false;  // b = 1: the query's own key is selected, as one of the k_t

  constexpr bool needs_variance() const {
    return policy == BudgetPolicy::eq8 || policy == BudgetPolicy::inverse || policy == BudgetPolicy::code;
  }
  int64_t most() const { return policy == BudgetPolicy::fixed ? base : max; }
};

/// What a layer adds up over a step, one row of f64.
enum IndexSum : int64_t {
  kIndexVariance,  // sum of V_t, where it is finite, over queries with candidates that are not padding (eq8,
                   // inverse, code)
  kIndexQueries,   // number of these (query, set) pairs
  kIndexSelected,  // sum of the number of selected blocks (the own one of b > 1 left out)
  kIndexSquares,   // sum of its square
  kIndexLoss,      // sum of the KL divergences over counted (query, set) pairs
  kIndexCounted,   // number of these pairs
  kIndexSums
};

/// The k_t largest scores of every query, ties to the largest s; exact, whatever the number of threads.
/// `mean_variance` (1) or empty. sums (kIndexSums) f64, or empty: added to. targets (Tq) i32, or empty:
/// queries with kPadding (core/targets.h) are left out of the sums. Error(numeric), which names `where`, if a
/// score is not a number.
void select_keys(Context& ctx, const Selection& out, const IndexInputs& in, const Budget& budget,
                 const Tensor& mean_variance, Tensor sums, const char* where, const Tensor& targets = {});

/// y (Tk, d): in the row of the first token of each block (counted from first_key (Tk) i32, the start of
/// every token's sequence) that is complete the mean of the block's rows of x; 0 in all other rows.
/// Overwritten.
void block_means(Context& ctx, Tensor y, const Tensor& x, const Tensor& first_key, int64_t block);
/// dx (Tk, d) overwritten, from dy.
void block_means_backward(Context& ctx, Tensor dx, const Tensor& dy, const Tensor& first_key, int64_t block);

/// Attention's part in the loss: the target is p_ts = mean over the set's heads of exp(z_ts - lse_t).
struct IndexTarget {
  Tensor q, k;       // (Tq, H, D), (Tk, Hkv, D), as the scores of attention read them
  Tensor lse;        // (H, Tq)
  double scale = 1;  // of attention
  Tensor targets;    // (Tq) i32: queries with a negative one are not counted
};
/// Gradients of the indexer; dbias, dw_bias and dlog_temperature (accumulate_dtype) are added to, or empty.
struct IndexGrads {
  Tensor dq;                        // (Tq, J, d), overwritten
  Tensor dk;                        // (Tk, d), overwritten
  Tensor dw = {};                   // (Tq, J), overwritten; empty without head weights
  Tensor dbias = {}, dw_bias = {};  // (J)
  Tensor dlog_temperature = {};     // (1)
};
/// The loss sum over counted t, and g, of weight KL(p_t || pi_t), where pi_t = softmax(tau I_t), and both are
/// normalised over the scored keys of `selection`, or, if that is null, over all candidates:
///   dI_ts = weight tau (pi_ts - p_ts),  dlog_tau = weight tau sum_s (pi_ts - p_ts) I_ts
/// tau = exp(log_temperature (1)), or `temperature` where that is empty. weight = coefficient
/// gradient_scale[0], with gradient_scale (1) f64. sums: kIndexLoss and kIndexCounted are added to, without
/// weight. Tq = Tk, or with own_key of `in`. p has no gradient. Sums are in a fixed order, whatever the
/// number of threads.
struct IndexLoss {
  double coefficient = 1, temperature = 1;
  Tensor log_temperature = {};
  Tensor gradient_scale;
};
void index_loss(Context& ctx, const IndexGrads& grads, Tensor sums, const IndexInputs& in,
                const IndexTarget& target, const Selection* selection, const IndexLoss& loss);

}  // namespace sluice
