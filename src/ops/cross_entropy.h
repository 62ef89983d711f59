#pragma once
// Language-model head and cross-entropy, fused and chunked over rows: logits exist for one chunk of tokens at
// a time.
//   logits_t = hidden_t W^T,  loss_t = logsumexp(logits_t) - logits_t[target_t]
// The CPU keeps logits in f32 (f64 for f64). A GPU keeps those of a bf16 model in bf16 and computes on them
// in f32: an error of up to 2^-9 of the logit, which a mean over many tokens hardly shows and the loss of one
// token does.
// With a soft cap c > 0 the logits are c tanh(hidden W^T / c) instead (Gemma 2, 2024), as they are kept:
//   dlogits = scale_t (softmax - onehot) (1 - (logits / c)^2); without, the last factor is 1;
//   dhidden = dlogits W,  dW += dlogits^T hidden
// A z-loss on the logits (PaLM, Chowdhery et al. 2022, section 5) adds coefficient lse_t^2 to what is
// differentiated, with lse_t = logsumexp(logits_t), of capped logits under a cap:
//   dlogits = scale_t ((1 + 2 coefficient lse_t) softmax - onehot) (1 - (logits / c)^2)
// Targets (T) i32; kNoTarget and kPadding (core/targets.h) mean "no loss here": loss 0, gradient 0. Throws
// Error(data) for any other outside [0, V).
#include "ops/linear.h"

namespace sluice {

struct LogitZLoss {
  double coefficient = 0;
  /// (T) of accumulate_dtype(hidden), or empty: lse_t^2, 0 without a target, overwritten. The coefficient is
  /// not in it.
  Tensor squares = {};
};

/// losses (T) of accumulate_dtype(hidden), nats, overwritten.
void cross_entropy_forward(Context& ctx, Tensor losses, const Tensor& hidden, const LinearWeight& head,
                           const Tensor& targets, double soft_cap = 0);

/// losses as forward, without the z-loss; dhidden (T, C) overwritten; dweight (V, C) (accumulate_dtype) added
/// to or overwritten, as into_dweight says, or empty if it is not needed; every token's gradient is
/// multiplied by gradient_scale (1) f64 (1 / number of counted tokens of the global batch).
void cross_entropy_forward_backward(Context& ctx, Tensor losses, Tensor dhidden, Tensor dweight,
                                    const Tensor& hidden, const LinearWeight& head, const Tensor& targets,
                                    const Tensor& gradient_scale, double soft_cap = 0,
                                    const LogitZLoss& z = {}, Into into_dweight = Into::add);

}  // namespace sluice
