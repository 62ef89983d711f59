#pragma once
// Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") for one matrix w (N,
// K) with gradient g:
//   m <- mu m + (1 - mu) g      u = mu m + (1 - mu) g (Nesterov), or m
//   w <- w (1 - lr decay) - lr sqrt(max(1, N / K)) O,      O the orthogonal matrix nearest u, approximately
// The scalars of the step are read from the device (ops/adamw.h); a step that is not applied leaves w and m
// unchanged.
#include "core/context.h"
#include "ops/adamw.h"

namespace sluice {

/// mu of update t = control.step, counted from 1: rises linearly from initial_momentum to momentum over this
/// many updates.
struct MuonSettings {
  double momentum = 0.95, initial_momentum = 0.85;
  int64_t momentum_warmup_steps = 300;
  bool nesterov = true;

  double momentum_at(double t) const {
    const double steps = static_cast<double>(momentum_warmup_steps);
    return t > steps ? momentum : initial_momentum + (momentum - initial_momentum) * ((t - 1) / steps);
  }
};

/// m, gradient (N, K) of one type, f32 or f64: updates m, with the gradient multiplied by control's clip.
/// update (N, K), of that type or bf16, is overwritten with u, or with zeros if the step is not applied.
void muon_momentum(Context& ctx, Tensor update, Tensor m, const Tensor& gradient, const Tensor& control,
                   const MuonSettings& settings);

/// x (N, K) <- about U V^T of its singular value decomposition, in place: x / (sqrt(squares) + 1e-7), then
/// `steps` times
///   x <- (3.4445 I - 4.7750 A + 2.0315 A^2) x,  A = x x^T   (where N > K: x (...), A = x^T x),
/// which after 5 has singular values within [0.68, 1.21], those near 0 apart: the quintic does not converge.
/// squares (1) f64: the sum of the squares of x (ops/reduce.h). f32 and f64 are computed in their own
/// precision; bf16 in f32 on a CPU and by bf16 products with f32 sums on a GPU, as the authors do. On a CPU
/// the bits do not depend on the number of threads.
void newton_schulz(Context& ctx, Tensor x, const Tensor& squares, int64_t steps);

/// Applies the update above to value (N, K) (any type) and master (accumulate_dtype, or empty if value is
/// itself f32/f64), with O = update and lr = control's lr times lr_multiplier. value is the master rounded to
/// its type.
void muon_apply(Context& ctx, Tensor value, Tensor master, const Tensor& update, const Tensor& control,
                double lr_multiplier, double weight_decay);

}  // namespace sluice
