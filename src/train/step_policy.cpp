#include "train/step_policy.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace sluice {

double SpikeDetector::limit() const {
  const int64_t n = size();
  if (n == 0) return std::numeric_limits<double>::infinity();
  // Oldest to newest, so that a restored window gives the same bits.
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += at(i);
  const double mean = sum / static_cast<double>(n);
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += (at(i) - mean) * (at(i) - mean);
  const double sigma = std::sqrt(squares / static_cast<double>(n));
  if (n >= kWarmUp) return std::max(mean + 6 * sigma, mean * 1.02);
  double largest = start_level_;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, at(i));
  if (largest <= 0) return std::numeric_limits<double>::infinity();
  return std::max(mean + 6 * sigma * std::sqrt(static_cast<double>(kWarmUp) / static_cast<double>(n)),
                  start_factor_ * largest);
}

void SpikeDetector::add(double x) {
  ring_[static_cast<size_t>(added_ % kLength)] = x;
  ++added_;
}

std::vector<double> SpikeDetector::values() const {
  std::vector<double> result;
  for (int64_t i = 0; i < size(); ++i) result.push_back(at(i));
  return result;
}

void SpikeDetector::restore(const std::vector<double>& values) {
  added_ = 0;
  for (const double x : values) add(x);
}

StepPolicy::Decision StepPolicy::decide(int64_t step, double loss, double grad_norm) {
  Decision d;
  d.finite = std::isfinite(loss) && std::isfinite(grad_norm);
  BadStepPolicy on_bad = on_nonfinite_;
  if (d.finite) {
    d.spike = losses_.is_spike(loss) || grad_norms_.is_spike(grad_norm);
    if (!d.spike) {
      losses_.add(loss);
      grad_norms_.add(grad_norm);
      return d;
    }
    ++spikes_;
    if (on_spike_ == BadStepPolicy::count) return d;
    on_bad = on_spike_;
  }
  if (on_bad == BadStepPolicy::stop) {
    d.action = Action::stop;
    return d;
  }
  // A non-finite update is never applied, even where it is only to be counted.
  d.budget_exhausted = skip_exhausts_budget(step);
  d.action = d.budget_exhausted ? Action::stop : Action::skip;
  return d;
}

bool StepPolicy::skip_exhausts_budget(int64_t step) {
  const auto n = static_cast<int64_t>(skipped_steps_.size());
  skipped_steps_[static_cast<size_t>(skipped_ % n)] = step;
  ++skipped_;
  if (skipped_ < n) return false;
  const int64_t oldest = skipped_steps_[static_cast<size_t>(skipped_ % n)];
  return step - oldest < kBudgetWindow;
}

nlohmann::json StepPolicy::state() const {
  const auto n = static_cast<int64_t>(skipped_steps_.size());
  std::vector<int64_t> recent;
  for (int64_t i = std::max<int64_t>(0, skipped_ - n); i < skipped_; ++i)
    recent.push_back(skipped_steps_[static_cast<size_t>(i % n)]);
  return {{"spikes", spikes_},
          {"skipped", skipped_},
          {"recently_skipped_steps", recent},
          {"losses", losses_.values()},
          {"grad_norms", grad_norms_.values()}};
}

void StepPolicy::restore(const StateReader& state, int64_t steps_done) {
  spikes_ = state.integer("spikes", 0, steps_done);
  skipped_ = state.integer("skipped", 0, steps_done);
  const auto n = static_cast<int64_t>(skipped_steps_.size());
  const auto recent = state.integers("recently_skipped_steps", std::min(skipped_, n), 0, steps_done - 1);
  for (size_t i = 0; i < recent.size(); ++i) {
    const int64_t index = skipped_ - static_cast<int64_t>(recent.size()) + static_cast<int64_t>(i);
    skipped_steps_[static_cast<size_t>(index % n)] = recent[i];
  }
  const auto losses = state.numbers("losses", StateReader::kAnyCount);
  if (std::ssize(losses) > std::min(steps_done, SpikeDetector::kLength))
    state.refuse("losses", fmt::format("a list of at most {}", std::min(steps_done, SpikeDetector::kLength)));
  losses_.restore(losses);
  grad_norms_.restore(state.numbers("grad_norms", std::ssize(losses), 0));
}

}  // namespace sluice
