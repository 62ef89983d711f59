#include "optim/optimizer.h"

#include <algorithm>
#include <limits>

#include "ops/elementwise.h"
#include "ops/reduce.h"

namespace sluice {

Optimizer::Optimizer(const OptimizerConfig& config, ParamStore& store)
    : config_(config), store_(store), muon_(config.muon) {
  std::vector<bool> used(config.rules.size(), false);
  for (const ParamSpec& spec : store.specs()) {
    if (!spec.trainable) {
      lr_multiplier_.push_back(0);
      weight_decay_.push_back(0);
      continue;
    }
    double multiplier = 1.0;
    bool decays = spec.weight_decay;
    for (size_t r = 0; r < config.rules.size(); ++r) {
      const ParameterRule& rule = config.rules[r];
      if (spec.name.find(rule.match) == std::string::npos) continue;
      used[r] = true;
      multiplier = rule.lr_multiplier;
      decays = rule.weight_decay.value_or(spec.weight_decay);
    }
    if (takes_muon(spec))
      muon_.add(static_cast<ParamStore::Id>(lr_multiplier_.size()), multiplier * config.muon.lr / config.lr,
                decays ? config.muon.weight_decay : 0.0);
    lr_multiplier_.push_back(multiplier);
    weight_decay_.push_back(decays ? config.weight_decay : 0.0);
  }
  // A rule that touches nothing is a misspelt name, and a run with it would not be the run that was meant.
  for (size_t r = 0; r < used.size(); ++r)
    if (!used[r])
      fail(ExitCode::usage, "optimizer.rules[{}]: no{} parameter's name contains '{}'", r,
           store.total_trained() < store.total() ? " trained" : "", config.rules[r].match);
}

/// Parameters of AdamW, in the order they lie in, cut where one of Muon's lies between.
std::vector<std::vector<ParamStore::Slice>> Optimizer::runs() const {
  std::vector<ParamStore::Slice> all;
  for (ParamStore::Id id = 0; id < static_cast<ParamStore::Id>(store_.specs().size()); ++id)
    if (store_.trains(id)) all.push_back({.id = id, .count = store_.numel(id), .at = store_.offset(id)});
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.at < b.at; });
  std::vector<std::vector<ParamStore::Slice>> runs;
  bool open = false;
  for (const ParamStore::Slice& slice : all) {
    const bool muon = takes_muon(store_.specs()[static_cast<size_t>(slice.id)]);
    if (!muon && !open) runs.emplace_back();
    if (!muon) runs.back().push_back(slice);
    open = !muon;
  }
  return runs;
}

Optimizer::Part Optimizer::make_part(Context& ctx, Arena& arena, const std::vector<ParamStore::Slice>& slices,
                                     int64_t at, int64_t count, int64_t v_at) const {
  std::vector<double> rows;
  for (const ParamStore::Slice& slice : slices)
    for (const double x :
         {static_cast<double>(slice.at), static_cast<double>(slice.at + slice.count),
          lr_multiplier_[static_cast<size_t>(slice.id)], weight_decay_[static_cast<size_t>(slice.id)]})
      rows.push_back(x);
  Part part{at, count, v_at, arena.alloc("segments", DType::f64, {static_cast<int64_t>(slices.size()), 4})};
  if (!arena.measuring() && !rows.empty()) write_tensor(ctx, part.segments, rows.data());
  return part;
}

void Optimizer::allocate(Context& ctx, Arena& arena, const std::vector<ParamStore::Piece>& pieces) {
  const DType moments = accumulate_dtype(store_.dtype());
  const bool muon = config_.type == OptimizerType::muon;
  SLUICE_CHECK(!muon || pieces.empty(), "Optimizer: Muon needs whole matrices, not pieces");
  pieces_ = pieces;
  const int64_t count = pieces.empty() ? store_.flat_values().numel() : ParamStore::size_of(pieces);
  std::vector<std::vector<ParamStore::Slice>> runs = this->runs();
  const auto length = [](const std::vector<ParamStore::Slice>& run) {
    return run.back().at + run.back().count - run.front().at;
  };
  constexpr int64_t kAlign = 32;  // as parameters
  int64_t v_count = muon ? 0 : count;
  if (muon)
    for (const auto& run : runs) v_count += (length(run) + kAlign - 1) / kAlign * kAlign;
  m_ = arena.alloc("m", moments, {count});
  v_ = arena.alloc("v", moments, {v_count});
  master_ = store_.dtype() != moments ? arena.alloc("master", moments, {count}) : Tensor();
  control_ = arena.alloc("control", DType::f64, {kUpdateControl});
  parts_.clear();
  for (const ParamStore::Piece& piece : pieces)
    parts_.push_back(make_part(ctx, arena, store_.slices(piece), piece.at, piece.count, piece.at));
  if (!pieces.empty()) return;
  if (!muon) {
    parts_.push_back(
        make_part(ctx, arena, runs.empty() ? std::vector<ParamStore::Slice>() : runs[0], 0, count, 0));
    return;
  }
  int64_t v_at = 0;
  for (auto& run : runs) {
    const int64_t at = run.front().at, size = length(run);
    for (ParamStore::Slice& slice : run) slice.at -= at;
    parts_.push_back(make_part(ctx, arena, run, at, size, v_at));
    v_at += (size + kAlign - 1) / kAlign * kAlign;
  }
}

void Optimizer::sync_master(Context& ctx, const std::vector<Tensor>& values) {
  if (!master_) return;
  if (pieces_.empty()) return cast(ctx, master_, store_.flat_values());
  for (size_t i = 0; i < pieces_.size(); ++i)
    cast(ctx, master_.rows(pieces_[i].at, pieces_[i].count), values[i]);
}

void Optimizer::update(Context& ctx) {
  SLUICE_CHECK(m_, "Optimizer::update before allocate");
  sum_of_squares(ctx, update_field(control_, &UpdateControl::squares), store_.flat_grads());
  judge_and_update(ctx);
}

void Optimizer::judge_and_update(Context& ctx, const std::vector<Tensor>& values,
                                 const std::vector<Tensor>& grads) {
  const AdamwSettings settings{.beta1 = config_.beta1, .beta2 = config_.beta2, .eps = config_.eps};
  judge_update(ctx, control_, settings);
  const bool given = !pieces_.empty();
  SLUICE_CHECK(!given || (values.size() == pieces_.size() && grads.size() == pieces_.size()),
               "judge_and_update: {} values and {} gradients of {} pieces", values.size(), grads.size(),
               pieces_.size());
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& p = parts_[i];
    const auto part = [&](const Tensor& flat) { return flat ? flat.rows(p.at, p.count) : Tensor(); };
    adamw_update(ctx, given ? values[i] : part(store_.flat_values()), part(master_), part(m_),
                 v_.rows(p.v_at, p.count), given ? grads[i] : part(store_.flat_grads()), p.segments, control_,
                 settings);
  }
  muon_.update(ctx, store_, m_, master_, control_);
}

Tensor Optimizer::v(ParamStore::Id id) const {
  const int64_t at = store_.offset(id);
  for (const Part& p : parts_) {
    if (at < p.at || at >= p.at + p.count) continue;
    Tensor t = store_.part(m_, id);
    if (v_.data) t.data = static_cast<char*>(v_.data) + (p.v_at + at - p.at) * dtype_size(v_.dtype);
    return t;
  }
  return {};
}

std::vector<const char*> Optimizer::state_names(const ParamSpec& spec) const {
  std::vector<const char*> names = {".m"};
  if (!takes_muon(spec)) names.push_back(".v");
  if (master_) names.push_back(".master");
  return names;
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
