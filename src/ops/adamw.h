#pragma once
// AdamW (Loshchilov & Hutter 2019, alg. 2) with decoupled weight decay: w <- w - lr (m_hat / (sqrt(v_hat) +
// eps) + decay w), over flat buffers of all parameters at once, and the decision whether a step's update is
// applied. Both read their scalars from the device, so that a step does not wait for the host.
#include "core/context.h"

namespace sluice {

/// The scalars of one update: a tensor (kUpdateControl) f64 on the context's device, in this order.
struct UpdateControl {
  // set by the host before the step
  double lr = 0;              // learning rate of this step
  double step = 1;            // t of the bias correction, from 1
  double gradient_scale = 1;  // 1 / counted tokens of the global batch
  double token_weight = 1;    // 1 / tokens of the global batch that are not padding
  double max_grad_norm = 0;   // clipping; 0 = none
  double loss_limit =
      0;  // the update is skipped if the loss or gradient norm exceeds its limit or is not finite
  double grad_norm_limit = 0;
  // set by the step
  double loss = 0;     // sum of the losses of all counted tokens; judge_update turns it into their mean
  double squares = 0;  // sum of the squares of all gradients
  // set by judge_update
  double grad_norm = 0;  // sqrt(squares)
  double clip = 0;       // the gradient is multiplied by this: min(1, max_grad_norm / grad_norm)
  double apply = 0;      // 1 or 0
  double correction1 = 0, correction2 = 0;  // 1 - beta1^t, 1 - beta2^t
};
constexpr int64_t kUpdateControl = sizeof(UpdateControl) / sizeof(double);

/// One scalar of a control tensor, as a tensor (1) f64.
inline Tensor update_field(const Tensor& control, double UpdateControl::*field) {
  const UpdateControl origin{};
  return control.rows(&(origin.*field) - &origin.lr, 1);
}

struct AdamwSettings {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
};

/// Computes the last part of control from the others.
void judge_update(Context& ctx, Tensor control, const AdamwSettings& settings);

/// value (any dtype), master (accumulate_dtype, or empty if value is itself f32/f64), m, v, gradient
/// (accumulate_dtype): flat, of equal element count; all except gradient are updated in place, unless control
/// has apply = 0. value is the master rounded to its dtype. segments (S, 4) f64: rows (begin, end, lr
/// multiplier, weight decay) in elements, ascending and disjoint; elements between them are padding and
/// remain unchanged.
void adamw_update(Context& ctx, Tensor value, Tensor master, Tensor m, Tensor v, const Tensor& gradient,
                  const Tensor& segments, const Tensor& control, const AdamwSettings& settings);

/// The same bits, and sums (S, 2) i32: for each segment the sums modulo 2^32 of word_bits (ops/bit_sum.h) of
/// all that was read of value, master, m and v, and of all that was written. Unchanged where control has
/// apply = 0. On a CPU alone.
void adamw_update_summed(Context& ctx, Tensor sums, Tensor value, Tensor master, Tensor m, Tensor v,
                         const Tensor& gradient, const Tensor& segments, const Tensor& control,
                         const AdamwSettings& settings);

}  // namespace sluice
