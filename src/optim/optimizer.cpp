#include "optim/optimizer.h"

#include <cmath>

#include "ops/adamw.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"

namespace sluice {

double gradient_norm(Context& ctx, const ParamStore& store) {
  double squares = 0;
  sum_of_squares(ctx, &squares, store.flat_grads());
  return std::sqrt(squares);
}

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

void Optimizer::allocate(Arena& arena) {
  const DType moments = accumulate_dtype(store_.dtype());
  const bool needs_master = store_.dtype() != moments;
  m_.clear(), v_.clear(), master_.clear();
  const auto alloc = [&](const ParamSpec& spec, const char* what) {
    const std::string name = spec.name + what;
    return spec.shape.size() == 1 ? arena.alloc(name, moments, {spec.shape[0]})
                                  : arena.alloc(name, moments, {spec.shape[0], spec.shape[1]});
  };
  for (const ParamSpec& spec : store_.specs()) {
    m_.push_back(alloc(spec, ".m"));
    v_.push_back(alloc(spec, ".v"));
    if (needs_master) master_.push_back(alloc(spec, ".master"));
  }
}

void Optimizer::sync_master(Context& ctx) {
  for (size_t i = 0; i < master_.size(); ++i)
    cast(ctx, master_[i], store_.value(static_cast<ParamStore::Id>(i)));
}

void Optimizer::step(Context& ctx, double lr, double gradient_scale) {
  SLUICE_CHECK(m_.size() == lr_multiplier_.size(), "Optimizer::step before allocate");
  AdamwStep step{.lr = lr,
                 .beta1 = config_.beta1,
                 .beta2 = config_.beta2,
                 .eps = config_.eps,
                 .weight_decay = 0,
                 .step = steps_applied_ + 1,
                 .gradient_scale = gradient_scale};
  for (size_t i = 0; i < m_.size(); ++i) {
    const auto id = static_cast<ParamStore::Id>(i);
    step.lr = lr * lr_multiplier_[i];
    step.weight_decay = weight_decay_[i];
    adamw_update(ctx, store_.value(id), master(id), m_[i], v_[i], store_.grad(id), step);
  }
  if (!ctx.dry_run) ++steps_applied_;  // measuring memory is no update
}

}  // namespace sluice
