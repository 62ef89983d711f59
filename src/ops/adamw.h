#pragma once
// AdamW (Loshchilov & Hutter 2019, alg. 2), decoupled decay: w <- w - lr (m_hat / (sqrt(v_hat) + eps) + decay w).
#include "core/context.h"

namespace sluice {

struct AdamwStep {
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
  int64_t step = 1;           // t of the bias correction, from 1
  double gradient_scale = 1;  // the gradient is multiplied by this first (clipping)
};

/// value (any dtype), master (accumulate_dtype, or empty when value is itself f32/f64), m, v, gradient (accumulate_dtype):
/// all of equal element count, updated in place except gradient. value is the master rounded to its dtype.
void adamw_update(Context& ctx, Tensor value, Tensor master, Tensor m, Tensor v, const Tensor& gradient,
                  const AdamwStep& step);

}  // namespace sluice
