#include "run/divergence.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

namespace sluice {

constexpr int64_t kMostSteps = int64_t{1} << 53;  // that a checkpoint may claim

double Divergence::smoothed() const { return count_ > 0 ? sum_ / weight_ : 0; }

double Divergence::limit(double factor) const {
  const double lowest = count_ < kSettled ? std::max(first_, chance_) : lowest_;
  return std::max(factor * lowest, lowest + kLeastRise);
}

std::string Divergence::add(int64_t step, double loss) {
  if (!std::isfinite(loss)) return "";  // handled by StepPolicy
  if (count_ == 0) first_ = loss;
  ++count_;
  sum_ = kDecay * sum_ + (1 - kDecay) * loss;
  weight_ = kDecay * weight_ + (1 - kDecay);
  const double now = smoothed();
  if (count_ == kSettled) lowest_ = std::max(first_, chance_);
  if (count_ >= kSettled) lowest_ = std::min(lowest_, now);

  const auto exceeds = [&](double factor, double above_chance) {
    return (factor > 0 && now > limit(factor)) ||
           (step >= warmup_steps_ + kAfterWarmup && now > above_chance * chance_);
  };
  if (since_ == 0 && exceeds(factor_, kAboveChance)) {
    since_ = step;
    return fmt::format(
        "step {}: the training has diverged: {}; a lower learning rate, more warm-up steps or clipping may "
        "help",
        step, describe());
  }
  if (since_ > 0 && !exceeds(factor_ > 0 ? (1 + factor_) / 2 : 0, 1)) {
    const std::string text = fmt::format(
        "step {}: the loss, which had diverged at step {}, has recovered: {}", step, since_, describe());
    since_ = 0;
    return text;
  }
  return "";
}

std::string Divergence::describe() const {
  return fmt::format(
      "the smoothed loss is {:.2f} and was as low as {:.2f}; the loss of a uniform guess, ln(vocabulary), is "
      "{:.2f}",
      smoothed(), count_ < kSettled ? std::min(first_, smoothed()) : lowest_, chance_);
}

nlohmann::json Divergence::state() const {
  return {{"count", count_}, {"sum", sum_},       {"weight", weight_},
          {"first", first_}, {"lowest", lowest_}, {"since", since_}};
}

void Divergence::restore(const StateReader& state) {
  count_ = state.integer("count", 0, kMostSteps);
  sum_ = state.number("sum");
  weight_ = state.number("weight", 0);
  first_ = state.number("first");
  lowest_ = state.number("lowest");
  since_ = state.integer("since", 0, kMostSteps);
  if (count_ > 0 && weight_ <= 0) state.refuse("weight", "more than 0 after the first step");
}

}  // namespace sluice
