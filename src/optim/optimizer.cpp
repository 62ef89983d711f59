#include "optim/optimizer.h"

#include <algorithm>
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

void Optimizer::allocate(Context& ctx, Arena& arena, const std::vector<ParamStore::Piece>& pieces) {
  const DType moments = accumulate_dtype(store_.dtype());
  pieces_ = pieces;
  const int64_t count = pieces.empty() ? store_.flat_values().numel() : ParamStore::size_of(pieces);
  m_ = arena.alloc("m", moments, {count});
  v_ = arena.alloc("v", moments, {count});
  master_ = store_.dtype() != moments ? arena.alloc("master", moments, {count}) : Tensor();
  control_ = arena.alloc("control", DType::f64, {kUpdateControl});
  segments_.clear();
  const auto add = [&](const std::vector<ParamStore::Slice>& slices) {
    std::vector<double> rows;
    for (const ParamStore::Slice& slice : slices)
      for (const double x : {static_cast<double>(slice.at), static_cast<double>(slice.at + slice.count),
                             lr_multiplier_[static_cast<size_t>(slice.id)], weight_decay_[static_cast<size_t>(slice.id)]})
        rows.push_back(x);
    segments_.push_back(arena.alloc("segments", DType::f64, {static_cast<int64_t>(slices.size()), 4}));
    if (!arena.measuring() && !rows.empty()) write_tensor(ctx, segments_.back(), rows.data());
  };
  for (const ParamStore::Piece& piece : pieces) add(store_.slices(piece));
  if (!pieces.empty()) return;
  std::vector<ParamStore::Slice> all;
  for (ParamStore::Id id = 0; id < static_cast<ParamStore::Id>(store_.specs().size()); ++id)
    all.push_back({.id = id, .count = store_.numel(id), .at = store_.offset(id)});
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.at < b.at; });
  add(all);
}

void Optimizer::sync_master(Context& ctx, const std::vector<Tensor>& values) {
  if (!master_) return;
  if (pieces_.empty()) return cast(ctx, master_, store_.flat_values());
  for (size_t i = 0; i < pieces_.size(); ++i) cast(ctx, master_.rows(pieces_[i].at, pieces_[i].count), values[i]);
}

void Optimizer::update(Context& ctx) {
  SLUICE_CHECK(m_, "Optimizer::update before allocate");
  sum_of_squares(ctx, update_field(control_, &UpdateControl::squares), store_.flat_grads());
  judge_and_update(ctx);
}

void Optimizer::judge_and_update(Context& ctx, const std::vector<Tensor>& values, const std::vector<Tensor>& grads) {
  const AdamwSettings settings{.beta1 = config_.beta1, .beta2 = config_.beta2, .eps = config_.eps};
  judge_update(ctx, control_, settings);
  if (pieces_.empty())
    return adamw_update(ctx, store_.flat_values(), master_, m_, v_, store_.flat_grads(), segments_[0], control_, settings);
  SLUICE_CHECK(values.size() == pieces_.size() && grads.size() == pieces_.size(), "judge_and_update: {} values and {} gradients of {} pieces",
               values.size(), grads.size(), pieces_.size());
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const auto part = [&](const Tensor& flat) { return flat ? flat.rows(pieces_[i].at, pieces_[i].count) : Tensor(); };
    adamw_update(ctx, values[i], part(master_), part(m_), part(v_), grads[i], segments_[i], control_, settings);
  }
}

std::vector<std::pair<const char*, Tensor>> Optimizer::flat_state() const {
  std::vector<std::pair<const char*, Tensor>> state = {{".m", m_}, {".v", v_}};
  if (master_) state.emplace_back(".master", master_);
  return state;
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
