#include "optim/rules.h"

#include "ops/bit_sum.h"
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

void sum_of_bits(Context& ctx, const UpdateRange& range, size_t member, int64_t column) {
  const UpdateRange::Member& m = range.members[member];
  const Tensor sum = range.sums.view({range.sums.numel()}).rows(2 * static_cast<int64_t>(member) + column, 1);
  if (!ctx.dry_run) *sum.as<int32_t>() = 0;
  const auto add = [&](const Tensor& flat) {
    if (flat) word_sum(ctx, sum, flat.rows(m.at, m.count));
  };
  add(range.value);
  add(range.master);
  for (const Tensor& state : range.state) add(state);
}

UpdateFactors AdamwRule::factors(double lr_multiplier, bool decays) const {
  return {lr_multiplier, decays ? config_.weight_decay : 0.0};
}

void AdamwRule::update(Context& ctx, const UpdateRange& range, const Tensor& control) const {
  const AdamwSettings settings = adamw_settings(config_);
  if (range.sums)
    return adamw_update_summed(ctx, range.sums, range.value, range.master, range.state[0], range.state[1],
                               range.gradient, range.segments, control, settings);
  adamw_update(ctx, range.value, range.master, range.state[0], range.state[1], range.gradient, range.segments,
               control, settings);
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
  // The products take so much longer that sums by passes of their own cost little.
  const auto sum_bits = [&](size_t i, int64_t column) {
    if (range.sums) sum_of_bits(ctx, range, i, column);
  };
  for (size_t i = 0; i < range.members.size(); ++i) {
    const UpdateRange::Member& member = range.members[i];
    const int64_t N = member.spec->shape[0], K = member.spec->shape[1];
    SLUICE_CHECK(member.count == N * K, "Muon: {} is cut, and needs to be whole", member.spec->name);
    const auto matrix = [&](const Tensor& flat) { return flat.rows(member.at, member.count).view({N, K}); };
    const Tensor momentum = matrix(range.state[0]);
    ScratchScope t(ctx.scratch);
    const Tensor update = t.alloc("muon update", narrow ? DType::bf16 : momentum.dtype, {N, K});
    const Tensor squares = t.alloc("muon squares", DType::f64, {1});
    sum_bits(i, 0);
    muon_momentum(ctx, update, momentum, matrix(range.gradient), control, settings);
    sum_of_squares(ctx, squares, update);
    newton_schulz(ctx, update, squares, muon.newton_schulz_steps);
    muon_apply(ctx, matrix(range.value), range.master ? matrix(range.master) : Tensor(), update, control,
               member.factors.lr_multiplier, member.factors.weight_decay);
    sum_bits(i, 1);
  }
}

}  // namespace sluice
