#include "optim/optimizer.h"

#include <limits>

#include "ops/elementwise.h"
#include "ops/reduce.h"

namespace sluice {

Optimizer::Optimizer(const OptimizerConfig& config, ParamStore& store) : config_(config), store_(store) {
  std::vector<bool> used(config.rules.size(), false);
  for (const ParamSpec& spec : store.specs()) {
    double multiplier = 1.0;
    bool decays = spec.weight_decay;
    for (size_t r = 0; r < config.rules.size(); ++r) {
      const ParameterRule& rule = config.rules[r];
      if (spec.name.find(rule.match) == std::string::npos) continue;
      used[r] = true;
      multiplier = rule.lr_multiplier;
      decays = rule.weight_decay.value_or(spec.weight_decay);
    }
    lr_multiplier_.push_back(multiplier);
    weight_decay_.push_back(decays ? config.weight_decay : 0.0);
  }
  // A rule that touches nothing is a misspelt name, and a run with it would not be the run that was meant.
  for (size_t r = 0; r < used.size(); ++r)
    if (!used[r])
      fail(ExitCode::usage, "optimizer.rules[{}]: no parameter's name contains '{}'", r,
           config.rules[r].match);
}

void Optimizer::allocate(Context& ctx, Arena& arena) {
  const DType moments = accumulate_dtype(store_.dtype());
  const int64_t count = store_.flat_values().numel();
  m_ = arena.alloc("m", moments, {count});
  v_ = arena.alloc("v", moments, {count});
  master_ = store_.dtype() != moments ? arena.alloc("master", moments, {count}) : Tensor();
  segments_ = arena.alloc("segments", DType::f64, {static_cast<int64_t>(store_.specs().size()), 4});
  control_ = arena.alloc("control", DType::f64, {kUpdateControl});
  if (arena.measuring()) return;
  std::vector<double> segments;
  for (size_t i = 0; i < store_.specs().size(); ++i) {
    const auto id = static_cast<ParamStore::Id>(i);
    const double begin = static_cast<double>(store_.offset(id));
    for (const double x :
         {begin, begin + static_cast<double>(store_.numel(id)), lr_multiplier_[i], weight_decay_[i]})
      segments.push_back(x);
  }
  write_tensor(ctx, segments_, segments.data());
}

void Optimizer::sync_master(Context& ctx) {
  if (master_) cast(ctx, master_, store_.flat_values());
}

void Optimizer::update(Context& ctx) {
  SLUICE_CHECK(m_, "Optimizer::update before allocate");
  const AdamwSettings settings{.beta1 = config_.beta1, .beta2 = config_.beta2, .eps = config_.eps};
  sum_of_squares(ctx, update_field(control_, &UpdateControl::squares), store_.flat_grads());
  judge_update(ctx, control_, settings);
  adamw_update(ctx, store_.flat_values(), master_, m_, v_, store_.flat_grads(), segments_, control_, settings);
}

UpdateControl Optimizer::step(Context& ctx, double lr, double max_grad_norm) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  UpdateControl control{.lr = lr,
                        .step = static_cast<double>(steps_applied_ + 1),
                        .gradient_scale = 1,
                        .max_grad_norm = max_grad_norm,
                        .loss_limit = kNone,
                        .grad_norm_limit = kNone};
  write_tensor(ctx, control_, &control);
  update(ctx);
  read_tensor(ctx, &control, control_);
  synchronize(ctx);
  if (!ctx.dry_run && control.apply != 0) ++steps_applied_;
  return control;
}

}  // namespace sluice
