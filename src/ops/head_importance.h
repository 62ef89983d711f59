#pragma once
// Importance of attention heads and a loss that balances it (the sink-aware paper, arXiv 2602.01203;
// README.md). The gate G_th in [0, 1] of token t at head h is, explicitly or implicitly,
//   softmax: G = 1 - A_t,first = -expm1(z0 - lse)   (equation 3; A_t,first is attention on the first key)
//   sink:    G = sigmoid(lse - sink_h)              (equation 21; exact), or of a sink's logit by query
//   gate:    G = mean over channels of a(z_th)      (a gate at the attention output)
// Importance Imp_h = mean over tokens of G_th (equation 5); imbalance of a layer CV = std_h(Imp) /
// mean_h(Imp) (equation 6); loss = coefficient sum over layers of N CV^2 over N heads (equation 7; equation 8
// leaves out the most important heads). A layer's heads take one row of f64: H sums of G over tokens, the
// number of those tokens, the number of batches, and the sum over batches of N CV^2. Sums are taken in order
// in chunks that depend only on the shape, so the number of threads does not affect them.
#include "ops/gate.h"

namespace sluice {

constexpr int64_t head_row_size(int64_t heads) { return heads + 3; }
/// Below this mean importance the heads of a layer count as closed, and their balance loss has no gradient.
constexpr double kLeastImportance = 1e-6;
/// Largest number of heads per layer in head_balance.
constexpr int64_t kMaxHeads = 1024;

/// The tensors that G is computed from: exactly one of first_key (softmax), sink and logits (gate) is set. T
/// tokens, H heads. Padding does not count, and its G has no gradient; those of a gate's logits are left to
/// ops/padding.h. Of one gate for all tokens, padding's counts like the others: it is the same.
struct HeadGate {
  Tensor lse = {}, z0 = {};  // (H, T) of accumulate_dtype: softmax needs both, sink lse
  Tensor first_key = {};     // (T) i32: softmax; ops/attention.h
  Tensor sink = {};          // (H), or (H, T) of accumulate_dtype: the logits of an extra key
  Tensor logits = {};        // (T, H, D) or (T, H); or one for all tokens, (1, H, D) or (1, H)
  GateKind kind = {};        // of logits: measures_importance must hold
  bool skip_first = true;    // softmax: leave out tokens with a single visible key, for which G is 0
  Tensor targets = {};       // (T) i32: kPadding (core/targets.h) marks padding; empty: there is none
};

/// batch (head_row_size(H)) f64 is overwritten with the sums of this batch, with loss 0; totals (the same
/// size) += batch. Either may be empty. `tokens`: T.
void head_importance(Context& ctx, Tensor batch, Tensor totals, const HeadGate& gate, int64_t tokens);

/// Converts the gradients u (H) f64 of every G_th to the inputs of attention's backward:
///   softmax: dlse (H, T) = u A and coef0 (H, T) = -u A with A = exp(z0 - lse), overwritten; 0 with one key
///   sink:    dlse (H, T) = u G (1 - G), overwritten; dsink (H) of accumulate_dtype -= its sum over tokens.
///            With logits by query dsink is empty: their gradient is -dlse.
/// For a sink, coef0 is empty. Gates use u directly (gate_backward, gated_attention_backward).
void head_importance_backward(Context& ctx, Tensor dlse, Tensor coef0, Tensor dsink, const Tensor& u,
                              const HeadGate& gate);

struct HeadBalance {
  double coefficient = 0;
  double token_fraction = 1;  // weight of one batch's loss: its fraction of the global batch's tokens
  int64_t shared_heads = 0;   // number of most important heads to leave out (ties to the lower index), unless
                              // `shared` selects them
  int64_t ddof = 1;           // 0 or 1
};

/// For L layers, with Imp from the rows `seen` (L, head_row_size(H)), c = N / (N - ddof) and
/// D = sum (Imp - mean)^2:
///   u (L, H) f64 = coefficient token_fraction batches / tokens dLoss/dImp_h, overwritten, where
///   dLoss/dImp_h = c 2 / mean^2 (Imp_h - mean - D / (N mean)), and 0 for heads that are left out (their
///   selection is not differentiated).
/// N CV^2 overwrites the last column of batch and is added to that of totals (which may be empty).
/// shared (L, H) f64: nonzero for heads to leave out; empty: see HeadBalance. With fewer than two remaining
/// heads, or all closed, u and loss are 0.
void head_balance(Context& ctx, Tensor u, Tensor batch, Tensor totals, const Tensor& seen,
                  const Tensor& shared, const HeadBalance& balance);

}  // namespace sluice
