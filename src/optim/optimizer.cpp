#include "optim/optimizer.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "config/problems.h"
#include "ops/elementwise.h"
#include "ops/reduce.h"

namespace sluice {
namespace {

constexpr int64_t kAlign = 32;  // elements, as parameters in the store

Tensor rows_or_none(const Tensor& flat, int64_t begin, int64_t count) {
  return flat ? flat.rows(begin, count) : Tensor();
}

}  // namespace

Optimizer::Optimizer(const OptimizerConfig& config, ParamStore& store, bool part)
    : config_(config), store_(store) {
  for (UpdateRule& rule : rules_of(config)) rules_.push_back({std::move(rule), {}});
  std::vector<bool> used(config.rules.size(), false), overruled = used;
  for (const ParamSpec& spec : store.specs()) {
    factors_.emplace_back();
    double multiplier = 1.0;
    bool decays = spec.weight_decay;
    std::optional<size_t> decides;  // the last rule that matches
    for (size_t r = 0; r < config.rules.size(); ++r) {
      const ParameterRule& rule = config.rules[r];
      if (!matches(rule, spec.name)) continue;
      if (decides) overruled[*decides] = true;
      decides = r;
      multiplier = rule.lr_multiplier;
      decays = rule.weight_decay.value_or(spec.weight_decay);
    }
    if (decides && (spec.trainable || !config.rules[*decides].trainable)) used[*decides] = true;
    if (!spec.trainable) continue;
    factors_.back() = std::visit([&](const auto& rule) { return rule.factors(multiplier, decays); },
                                 rules_[rule_of(spec)].rule);
  }
  if (part) return;
  ProblemList problems;
  // A rule without effect is probably a misspelt name.
  for (size_t r = 0; r < used.size(); ++r)
    if (!used[r])
      problems({fmt::format("optimizer.rules[{}].match", r)},
               overruled[r]
                   ? fmt::format("optimizer.rules[{}] has no effect: later rules decide for every parameter "
                                 "whose name contains '{}'; the last rule that matches a name decides",
                                 r, config.rules[r].match)
                   : fmt::format("optimizer.rules[{}]: no{} parameter's name contains '{}'", r,
                                 store.total_frozen() > 0 ? " trained" : "", config.rules[r].match));
  // Without rules only adapters can be missing, which the store reports when it is allocated.
  if (store.total() > 0 && store.total_trained() == 0 && !config.rules.empty())
    problems({"optimizer.rules"},
             "optimizer.rules freeze every parameter: nothing is left to train (the last rule that matches a "
             "name decides)");
  problems.raise();
}

size_t Optimizer::rule_of(const ParamSpec& spec) const {
  size_t last = 0;
  for (size_t r = 0; r < rules_.size(); ++r)
    if (std::visit([&](const auto& rule) { return rule.takes(spec); }, rules_[r].rule)) last = r;
  return last;
}

std::vector<const char*> Optimizer::names_of(size_t rule) const {
  return std::visit([](const auto& r) { return r.state_names(); }, rules_[rule].rule);
}

/// Of a piece; of all of the store (which is no bucket's) in the order they lie in.
std::vector<ParamStore::Slice> Optimizer::slices_of(const ParamStore::Piece& piece) const {
  if (!pieces_.empty()) return store_.slices(piece);
  std::vector<ParamStore::Slice> all;
  for (ParamStore::Id id = 0; id < static_cast<ParamStore::Id>(store_.specs().size()); ++id)
    if (store_.trains(id)) all.push_back({.id = id, .count = store_.numel(id), .at = store_.offset(id)});
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.at < b.at; });
  return all;
}

/// A range ends where another rule's parameter follows, and with its piece.
void Optimizer::cut_into_ranges() {
  ranges_.clear();
  std::vector<int64_t> state_end(rules_.size(), 0);
  const std::vector<ParamStore::Piece> whole = {{}};
  const std::vector<ParamStore::Piece>& pieces = pieces_.empty() ? whole : pieces_;
  for (size_t p = 0; p < pieces.size(); ++p) {
    for (const ParamStore::Slice& slice : slices_of(pieces[p])) {
      const ParamSpec& spec = store_.specs()[static_cast<size_t>(slice.id)];
      const size_t rule = rule_of(spec);
      Placed* last = ranges_.empty() || ranges_.back().piece != p ? nullptr : &ranges_.back();
      if (!last || last->rule != rule) {
        const int64_t aligned = slice.at / kAlign * kAlign,
                      from = last && aligned < last->from + last->count ? slice.at : aligned;
        ranges_.push_back({.rule = rule, .piece = p, .from = from, .master_at = pieces[p].at + from});
        last = &ranges_.back();
      }
      last->count = slice.at + slice.count - last->from;
      last->range.members.push_back({.id = slice.id,
                                     .spec = &spec,
                                     .begin = slice.begin,
                                     .count = slice.count,
                                     .at = slice.at - last->from,
                                     .factors = factors_[static_cast<size_t>(slice.id)]});
    }
  }
  for (Placed& placed : ranges_) {
    placed.state_at = state_end[placed.rule];
    state_end[placed.rule] += (placed.count + kAlign - 1) / kAlign * kAlign;
  }
}

void Optimizer::allocate(Context& ctx, Arena& arena, const std::vector<ParamStore::Piece>& pieces) {
  const DType wide = accumulate_dtype(store_.dtype());
  pieces_ = pieces;
  cut_into_ranges();
  for (size_t r = 0; r < rules_.size(); ++r) {
    int64_t size = 0;
    for (const Placed& placed : ranges_)
      if (placed.rule == r) size = (placed.state_at + placed.count + kAlign - 1) / kAlign * kAlign;
    rules_[r].buffers.clear();
    for (const char* name : names_of(r))
      rules_[r].buffers.push_back(arena.alloc(name + 1, wide, {size}));  // without its point
  }
  const int64_t count = pieces.empty() ? store_.flat_size() : ParamStore::size_of(pieces);
  master_ = store_.dtype() != wide ? arena.alloc("master", wide, {count}) : Tensor();
  control_ = arena.alloc("control", DType::f64, {kUpdateControl});
  for (Placed& placed : ranges_) {
    UpdateRange& range = placed.range;
    std::vector<double> rows;
    for (const UpdateRange::Member& m : range.members)
      for (const double x : {static_cast<double>(m.at), static_cast<double>(m.at + m.count),
                             m.factors.lr_multiplier, m.factors.weight_decay})
        rows.push_back(x);
    range.segments = arena.alloc("segments", DType::f64, {std::ssize(range.members), 4});
    if (!arena.measuring()) write_tensor(ctx, range.segments, rows.data());
    range.sums =
        watches_bits_ ? arena.alloc("sums of bits", DType::i32, {std::ssize(range.members), 2}) : Tensor();
    placed.written.assign(range.members.size(), 0);
    range.master = rows_or_none(master_, placed.master_at, placed.count);
    range.state.clear();
    for (const Tensor& buffer : rules_[placed.rule].buffers)
      range.state.push_back(buffer.rows(placed.state_at, placed.count));
  }
}

void Optimizer::sync_master(Context& ctx, const std::vector<Tensor>& values) {
  if (!master_) return;
  if (pieces_.empty()) return cast(ctx, master_, store_.flat_values());
  for (size_t i = 0; i < pieces_.size(); ++i)
    cast(ctx, master_.rows(pieces_[i].at, pieces_[i].count), values[i]);
}

void Optimizer::update(Context& ctx) {
  SLUICE_CHECK(control_, "Optimizer::update before allocate");
  sum_of_squares(ctx, update_field(control_, &UpdateControl::squares), store_.flat_grads());
  judge_and_update(ctx);
}

void Optimizer::judge_and_update(Context& ctx, const std::vector<Tensor>& values,
                                 const std::vector<Tensor>& grads) {
  judge_update(ctx, control_, adamw_settings(config_));
  const bool given = !pieces_.empty();
  SLUICE_CHECK(!given || (values.size() == pieces_.size() && grads.size() == pieces_.size()),
               "judge_and_update: {} values and {} gradients of {} pieces", values.size(), grads.size(),
               pieces_.size());
  for (Placed& placed : ranges_) {
    UpdateRange& range = placed.range;
    range.value = value_of(placed, values);
    range.gradient =
        rows_or_none(given ? grads[placed.piece] : store_.flat_grads(), placed.from, placed.count);
    std::visit([&](const auto& rule) { rule.update(ctx, range, control_); }, rules_[placed.rule].rule);
  }
  if (watches_bits_ && !ctx.dry_run && *update_field(control_, &UpdateControl::apply).as<double>() != 0)
    compare_sums(/*updated=*/true);
}

/// The store's, or a piece's.
Tensor Optimizer::value_of(const Placed& placed, const std::vector<Tensor>& values) const {
  return rows_or_none(pieces_.empty() ? store_.flat_values() : values[placed.piece], placed.from,
                      placed.count);
}

void Optimizer::sum_what_is_there(Context& ctx, const std::vector<Tensor>& values) {
  for (Placed& placed : ranges_) {
    placed.range.value = value_of(placed, values);
    for (size_t i = 0; i < placed.range.members.size(); ++i) sum_of_bits(ctx, placed.range, i, 0);
  }
}

void Optimizer::take_bits(Context& ctx, const std::vector<Tensor>& values) {
  sum_what_is_there(ctx, values);
  for (Placed& placed : ranges_)
    for (size_t i = 0; i < placed.written.size(); ++i)
      placed.written[i] = placed.range.sums.as<int32_t>()[2 * i];
  knows_bits_ = true;
}

void Optimizer::check_bits(Context& ctx, const std::vector<Tensor>& values) {
  if (!watches_bits_ || !knows_bits_) return;
  sum_what_is_there(ctx, values);
  compare_sums(/*updated=*/false);
}

/// updated: by an update, which has also written.
void Optimizer::compare_sums(bool updated) {
  for (Placed& placed : ranges_)
    for (size_t i = 0; i < placed.written.size(); ++i) {
      const int32_t* sums = placed.range.sums.as<int32_t>() + 2 * i;
      if (knows_bits_ && sums[0] != placed.written[i]) {
        if (changed_.parameters.empty()) changed_.after_updates = steps_applied_;
        changed_.parameters.push_back(placed.range.members[i].id);
      }
      if (updated) placed.written[i] = sums[1];
    }
  knows_bits_ = knows_bits_ || updated;
}

Optimizer::State Optimizer::state_of(const Placed& placed, const UpdateRange::Member& member) const {
  State state;
  const std::vector<const char*> names = names_of(placed.rule);
  for (size_t i = 0; i < names.size(); ++i)
    state.emplace_back(names[i], placed.range.state[i].rows(member.at, member.count));
  if (master_) state.emplace_back(kMasterSuffix, placed.range.master.rows(member.at, member.count));
  return state;
}

std::vector<Optimizer::Part> Optimizer::parts() const {
  std::vector<Part> parts;
  for (const Placed& placed : ranges_)
    for (const UpdateRange::Member& member : placed.range.members)
      parts.push_back({member.id, member.begin, state_of(placed, member)});
  return parts;
}

Optimizer::State Optimizer::state(ParamStore::Id id) const {
  SLUICE_CHECK(pieces_.empty(), "Optimizer::state: what is here are pieces");
  if (!store_.trains(id)) return {};
  const int64_t at = store_.offset(id);
  const auto behind = std::upper_bound(ranges_.begin(), ranges_.end(), at,
                                       [](int64_t x, const Placed& placed) { return x < placed.from; });
  SLUICE_CHECK(behind != ranges_.begin(), "Optimizer::state before allocate");
  const Placed& placed = *std::prev(behind);
  const auto& members = placed.range.members;
  const auto member = std::lower_bound(members.begin(), members.end(), at - placed.from,
                                       [](const UpdateRange::Member& m, int64_t x) { return m.at < x; });
  SLUICE_CHECK(member != members.end() && member->id == id, "Optimizer::state: parameter {} has none", id);
  State state = state_of(placed, *member);
  for (auto& [suffix, tensor] : state) {
    const Tensor shaped = store_.value(id);
    tensor.rank = shaped.rank;
    tensor.shape = shaped.shape;
    tensor.name = shaped.name;
  }
  return state;
}

Tensor Optimizer::state(ParamStore::Id id, std::string_view suffix) const {
  for (const auto& [name, tensor] : state(id))
    if (name == suffix) return tensor;
  return {};
}

std::vector<const char*> Optimizer::state_names(const ParamSpec& spec) const {
  std::vector<const char*> names = names_of(rule_of(spec));
  if (master_) names.push_back(kMasterSuffix);
  return names;
}

Optimizer::State Optimizer::flat_state() const {
  State state;
  for (size_t r = 0; r < rules_.size(); ++r) {
    const std::vector<const char*> names = names_of(r);
    for (size_t i = 0; i < names.size(); ++i) state.emplace_back(names[i], rules_[r].buffers[i]);
  }
  if (master_) state.emplace_back(kMasterSuffix, master_);
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
