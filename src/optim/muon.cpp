#include "optim/muon.h"

#include "ops/muon.h"
#include "ops/reduce.h"

namespace sluice {

void Muon::update(Context& ctx, const ParamStore& store, const Tensor& m, const Tensor& master,
                  const Tensor& control) const {
  const MuonSettings settings{.momentum = config_.momentum,
                              .initial_momentum = config_.initial_momentum,
                              .momentum_warmup_steps = config_.momentum_warmup_steps,
                              .nesterov = config_.nesterov};
  // On a GPU the products of a bf16 model are bf16, as the authors'; a CPU gains nothing by that.
  const bool narrow = ctx.device == Device::cuda && store.dtype() == DType::bf16;
  for (const Matrix& matrix : matrices_) {
    const Tensor value = store.value(matrix.id), momentum = store.part(m, matrix.id);
    ScratchScope t(ctx.scratch);
    const Tensor update =
        t.alloc("muon update", narrow ? DType::bf16 : momentum.dtype, {value.dim(0), value.dim(1)});
    const Tensor squares = t.alloc("muon squares", DType::f64, {1});
    muon_momentum(ctx, update, momentum, store.grad(matrix.id), control, settings);
    sum_of_squares(ctx, squares, update);
    newton_schulz(ctx, update, squares, config_.newton_schulz_steps);
    muon_apply(ctx, value, master ? store.part(master, matrix.id) : Tensor(), update, control,
               matrix.lr_multiplier, matrix.weight_decay);
  }
}

}  // namespace sluice
