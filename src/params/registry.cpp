#include "params/registry.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "config/problems.h"

namespace sluice {

ParamId ParamRegistry::add(ParamSpec spec) {
  if (spec.joined_in_backward && spec.joined) {
    spec.apart = can_join(spec) && trained(spec) != specs_.back().trainable;
    spec.joined = can_join(spec) && !spec.apart;
  }
  if (!spec.joined) add_adapters();
  const bool adapted = targets_.take(spec);
  const ParamId id = push(std::move(spec));
  if (adapted) to_adapt_.push_back(id);
  return id;
}

void ParamRegistry::begin_unit(int unit) {
  add_adapters();
  unit_ = unit;
}

void ParamRegistry::close() {
  add_adapters();
  targets_.check_used();
  closed_ = true;
}

void ParamRegistry::add_adapters() {
  const int unit = unit_;
  for (const ParamId id : std::exchange(to_adapt_, {})) {
    Adapter adapter{.matrix = id, .a = 0, .b = 0, .begin = 0};
    ParamId first = id;
    for (; spec(first).joined; --first) adapter.begin += spec(first - 1).shape[0];
    unit_ = spec(id).unit;
    auto [a, b] = targets_.specs_for(spec(id));
    adapter.a = push(std::move(a));
    adapter.b = push(std::move(b));
    adapters_[static_cast<size_t>(first)].push_back(adapter);
  }
  unit_ = unit;
}

bool ParamRegistry::trained(const ParamSpec& spec) const {
  bool trained = true;
  for (const ParameterRule& rule : rules_)
    if (matches(rule, spec.name)) trained = rule.trainable;
  return trained && !spec.statistic && (spec.adapter || !targets_.active());
}

bool ParamRegistry::can_join(const ParamSpec& spec) const {
  // Columns of a gradient that begin at multiples of 16 bytes, whatever the dtype.
  constexpr int64_t kRows = 8;
  if (specs_.empty()) return false;
  const ParamSpec& before = specs_.back();
  return before.joined_in_backward && before.shape[1] == spec.shape[1] &&
         before.numel() % ParamSpec::kAlignElements == 0 && before.shape[0] % kRows == 0 &&
         spec.shape[0] % kRows == 0;
}

ParamId ParamRegistry::push(ParamSpec spec) {
  SLUICE_CHECK(!spec.name.empty() && (spec.shape.size() == 1 || spec.shape.size() == 2),
               "parameter '{}': needs a name and rank 1 or 2, got rank {}", spec.name, spec.shape.size());
  SLUICE_CHECK(std::all_of(spec.shape.begin(), spec.shape.end(), [](int64_t d) { return d > 0; }),
               "parameter {}: every dimension must be positive", spec.name);
  SLUICE_CHECK(names_.insert(spec.name).second, "parameter {} is registered twice", spec.name);
  SLUICE_CHECK(!closed_, "parameter {}: registered after the store was allocated", spec.name);
  SLUICE_CHECK(spec.split.dim == Split::kWhole, "parameter {}: no axis cuts a dimension in this version",
               spec.name);
  if (spec.joined) {
    const bool matrix = spec.shape.size() == 2;
    SLUICE_CHECK(!specs_.empty() && specs_.back().shape.size() == spec.shape.size() &&
                     (!matrix || specs_.back().shape[1] == spec.shape[1]),
                 "parameter {}: joined needs a {} before it", spec.name,
                 matrix ? fmt::format("matrix of {} columns", spec.shape[1]) : "vector");
  }
  spec.unit = unit_;
  spec.trainable = trained(spec);
  if (spec.joined && spec.trainable != specs_.back().trainable)
    refuse({"optimizer.rules"},
           fmt::format("optimizer.rules: {} is {} and {} is {}, but both are parts of one matrix in memory; "
                       "freeze both or neither",
                       specs_.back().name, specs_.back().trainable ? "trained" : "frozen", spec.name,
                       spec.trainable ? "trained" : "frozen"));
  specs_.push_back(std::move(spec));
  adapters_.emplace_back();
  return static_cast<ParamId>(specs_.size()) - 1;
}

int64_t ParamRegistry::total() const {
  int64_t n = 0;
  for (const ParamSpec& spec : specs_) n += spec.numel();
  return n;
}

int64_t ParamRegistry::total_trained() const {
  int64_t n = 0;
  for (const ParamSpec& spec : specs_) n += spec.trainable ? spec.numel() : 0;
  return n;
}

int64_t ParamRegistry::total_frozen() const {
  int64_t n = 0;
  for (const ParamSpec& spec : specs_) n += spec.trainable || spec.statistic ? 0 : spec.numel();
  return n;
}

int64_t ParamRegistry::total_active() const {
  double n = 0;
  for (const ParamSpec& spec : specs_) n += static_cast<double>(spec.numel()) * spec.active;
  return static_cast<int64_t>(std::llround(n));
}

}  // namespace sluice
