#pragma once
// AdamW (Loshchilov & Hutter 2019, alg. 2), decoupled decay: w <- w - lr (m_hat / (sqrt(v_hat) + eps) + decay
// w), over flat buffers of all parameters at once; and the judgement whether a step's update is applied at
// all. Both read their numbers from the device, so that a step needs no answer from the host.
#include "core/context.h"

namespace sluice {

/// The numbers of one update: a tensor (kUpdateControl) f64 on the context's device, in this order.
struct UpdateControl {
  // from the host, before the step
  double lr = 0;              // learning rate of this step
  double step = 1;            // t of the bias correction, from 1
  double gradient_scale = 1;  // 1 / counted tokens of the global batch
  double max_grad_norm = 0;   // clipping; 0 = none
  double loss_limit = 0;      // a loss or a gradient norm above its limit, or not finite, is not applied
  double grad_norm_limit = 0;
  // from the step
  double loss = 0;     // sum of the losses of all counted tokens; judge_update turns it into their mean
  double squares = 0;  // sum of the squares of all gradients
  // from judge_update
  double grad_norm = 0;  // sqrt(squares)
  double clip = 0;       // the gradient is multiplied by this: min(1, max_grad_norm / grad_norm)
  double apply = 0;      // 1 or 0
  double correction1 = 0, correction2 = 0;  // 1 - beta1^t, 1 - beta2^t
};
constexpr int64_t kUpdateControl = sizeof(UpdateControl) / sizeof(double);

/// One number of a control tensor, as a tensor (1) f64.
inline Tensor update_field(const Tensor& control, double UpdateControl::*field) {
  const UpdateControl origin{};
  return control.rows(&(origin.*field) - &origin.lr, 1);
}

struct AdamwSettings {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
};

/// Fills the last part of control from the rest.
void judge_update(Context& ctx, Tensor control, const AdamwSettings& settings);

/// value (any dtype), master (accumulate_dtype, or empty when value is itself f32/f64), m, v, gradient
/// (accumulate_dtype): flat, of equal element count, updated in place except gradient; untouched when control
/// says apply = 0. value is the master rounded to its dtype. segments (S, 4) f64: rows (begin, end, lr
/// multiplier, weight decay) in elements, ascending, disjoint; what lies between them is padding and is left
/// alone.
void adamw_update(Context& ctx, Tensor value, Tensor master, Tensor m, Tensor v, const Tensor& gradient,
                  const Tensor& segments, const Tensor& control, const AdamwSettings& settings);

}  // namespace sluice
