#pragma once
// How open attention heads are, and a loss that evens it out (the sink-aware paper, arXiv 2602.01203;
// README.md). G_th in [0, 1] says how much of head h's output token t takes:
//   softmax: G = 1 - A_t,first = -expm1(z0 - lse)             (equation 3; exp(z0 - lse) is what the first
//   key draws) sink:    G = sigmoid(lse - sink_h)                        (equation 21; exact) gate:    G =
//   mean over channels of a(z_t h)               (a gate at attention's output) importance Imp_h = mean over
//   tokens of G_th (equation 5);  CV = std_h(Imp) / mean_h(Imp), a layer's imbalance (equation 6) loss =
//   coefficient sum over layers of N CV^2 over the N heads that count (equation 7; 8 leaves the most
//   important out)
// In a row of f64 a layer's heads stand as: H sums of G over tokens, the number of those tokens, the number
// of batches, and the sum over batches of N CV^2. Sums are taken in chunks of shape alone, in order: no
// number of threads changes them.
#include "ops/gate.h"

namespace sluice {

constexpr int64_t head_row_size(int64_t heads) { return heads + 3; }
/// Below this mean importance the heads of a layer are closed, and their balance has no gradient.
constexpr double kLeastImportance = 1e-6;
/// What head_balance is built for: heads of a layer.
constexpr int64_t kMaxHeads = 1024;

/// What G is made of: first_key for softmax, sink or logits for the others; those and no more. T tokens, H
/// heads.
struct HeadGate {
  Tensor lse = {}, z0 = {};  // (H, T) of accumulate_dtype: softmax needs both, sink lse
  Tensor first_key = {};     // (T) i32: softmax; ops/attention.h
  Tensor sink = {};          // (H)
  Tensor logits = {};        // (T, H, D) or (T, H); or one for all tokens, (1, H, D) or (1, H)
  GateKind kind = {};        // sigmoid or ns_sigmoid of scores specific to a head
  bool skip_first = true;    // softmax: tokens that see one key alone, for which G is 0, do not count
};

/// batch (head_row_size(H)) f64 overwritten: this batch's, its loss 0; totals (the same) += batch. Either may
/// be empty. `tokens`: T.
void head_importance(Context& ctx, Tensor batch, Tensor totals, const HeadGate& gate, int64_t tokens);

/// Of the gradients u (H) f64 of every G_th: what attention's backward takes.
///   softmax: dlse (H, T) = u A, coef0 (H, T) = -u A with A = exp(z0 - lse); both overwritten, 0 where one
///   key is visible sink:    dlse (H, T) = u G (1 - G), overwritten; dsink (H) of accumulate_dtype -= its sum
///   over tokens; coef0 is empty
/// Gates take u themselves (gate_backward, gated_attention_backward).
void head_importance_backward(Context& ctx, Tensor dlse, Tensor coef0, Tensor dsink, const Tensor& u,
                              const HeadGate& gate);

struct HeadBalance {
  double coefficient = 0;
  double share = 1;  // of the global batch, in one batch: its loss counts that much
  int64_t shared_heads =
      0;             // of largest importance, ties to the lower id, left out; unless `shared` says which
  int64_t ddof = 1;  // 0 or 1
};

/// For L layers, from rows `seen` (L, head_row_size(H)) that Imp is taken of:
///   u (L, H) f64 overwritten: coefficient share batches / tokens dLoss/dImp_h with c = N / (N - ddof), D =
///   sum (Imp - mean)^2,
///     dLoss/dImp_h = c 2 / mean^2 (Imp_h - mean - D / (N mean));   0 for heads left out (their choice is not
///     differentiated)
/// and N CV^2 put in the last column of batch (overwritten) and of totals (added; may be empty). shared (L,
/// H) f64: not 0 for heads that are left out; empty: see HeadBalance. With fewer than two heads left, or none
/// that is open, u and loss are 0.
void head_balance(Context& ctx, Tensor u, Tensor batch, Tensor totals, const Tensor& seen,
                  const Tensor& shared, const HeadBalance& balance);

}  // namespace sluice
