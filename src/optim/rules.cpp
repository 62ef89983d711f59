#include "optim/rules.h"

#include "ops/muon.h"
#include "ops/reduce.h"

namespace sluice {

std::vector<UpdateRule> rules_of(const OptimizerConfig& config) {
  switch (config.type) {
    case OptimizerType::adamw:
      return {AdamwRule(config)};
    case OptimizerType::muon:
      return {AdamwRule(config), MuonRule(config)};
  }
  fail(ExitCode::internal, "unknown optimizer");
}

UpdateFactors AdamwRule::factors(double lr_multiplier, bool decays) const {
  return {lr_multiplier, decays ? config_.weight_decay : 0.0};
}

void AdamwRule::update(Context& ctx, const UpdateRange& range, const Tensor& control) const {
  adamw_update(ctx, range.value, range.master, range.state[0], range.state[1], range.gradient, range.segments,
               control, adamw_settings(config_));
}

UpdateFactors MuonRule::factors(double lr_multiplier, bool decays) const {
  return {lr_multiplier * config_.muon.lr / config_.lr, decays ? config_.muon.weight_decay : 0.0};
}

void MuonRule::update(Context& ctx, const UpdateRange& range, const Tensor& control) const {
  const MuonConfig& muon = config_.muon;
  const MuonSettings settings{.momentum = muon.momentum,
                              .initial_momentum = muon.initial_momentum,
                              .momentum_warmup_steps = muon.momentum_warmup_steps,
                              .nesterov = muon.nesterov};
  // On a GPU the products of a bf16 model are bf16, as the authors'; a CPU gains nothing by that.
  const bool narrow = ctx.device == Device::cuda && range.value.dtype == DType::bf16;
  for (const UpdateRange::Member& member : range.members) {
    const int64_t N = member.spec->shape[0], K = member.spec->shape[1];
    SLUICE_CHECK(member.count == N * K, "Muon: {} is cut, and needs to be whole", member.spec->name);
    const auto matrix = [&](const Tensor& flat) { return flat.rows(member.at, member.count).view({N, K}); };
    const Tensor momentum = matrix(range.state[0]);
    ScratchScope t(ctx.scratch);
    const Tensor update = t.alloc("muon update", narrow ? DType::bf16 : momentum.dtype, {N, K});
    const Tensor squares = t.alloc("muon squares", DType::f64, {1});
    muon_momentum(ctx, update, momentum, matrix(range.gradient), control, settings);
    sum_of_squares(ctx, squares, update);
    newton_schulz(ctx, update, squares, muon.newton_schulz_steps);
    muon_apply(ctx, matrix(range.value), range.master ? matrix(range.master) : Tensor(), update, control,
               member.factors.lr_multiplier, member.factors.weight_decay);
  }
}

}  // namespace sluice
