#include "train/step_policy.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace sluice {

double SpikeWindow::limit() const {
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
  double largest = usual_;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, at(i));
  if (largest <= 0) return std::numeric_limits<double>::infinity();
  return std::max(mean + 6 * sigma * std::sqrt(static_cast<double>(kWarmUp) / static_cast<double>(n)),
                  early_factor_ * largest);
}

void SpikeWindow::accept(double x) {
  ring_[static_cast<size_t>(accepted_ % kLength)] = x;
  ++accepted_;
}

std::vector<double> SpikeWindow::values() const {
  std::vector<double> result;
  for (int64_t i = 0; i < size(); ++i) result.push_back(at(i));
  return result;
}

void SpikeWindow::restore(const std::vector<double>& values) {
  accepted_ = 0;
  for (const double x : values) accept(x);
}

StepPolicy::Judgement StepPolicy::judge(int64_t step, double loss, double grad_norm) {
  Judgement j;
  j.finite = std::isfinite(loss) && std::isfinite(grad_norm);
  BadStepPolicy action = on_nonfinite_;
  if (j.finite) {
    j.spike = losses_.is_spike(loss) || grad_norms_.is_spike(grad_norm);
    if (!j.spike) {
      losses_.accept(loss);
      grad_norms_.accept(grad_norm);
      return j;
    }
    ++spikes_;
    if (on_spike_ == BadStepPolicy::count) return j;
    action = on_spike_;
  }
  if (action == BadStepPolicy::stop) {
    j.verdict = Verdict::stop;
    return j;
  }
  // A non-finite update is never applied, even where it is only to be counted.
  j.budget_exhausted = skip_exhausts_budget(step);
  j.verdict = j.budget_exhausted ? Verdict::stop : Verdict::skip;
  return j;
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
  if (std::ssize(losses) > std::min(steps_done, SpikeWindow::kLength))
    state.refuse("losses", fmt::format("a list of at most {}", std::min(steps_done, SpikeWindow::kLength)));
  losses_.restore(losses);
  grad_norms_.restore(state.numbers("grad_norms", std::ssize(losses), 0));
}

}  // namespace sluice
