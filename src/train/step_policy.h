#pragma once
// Which steps are not applied (README.md): a loss or gradient norm that is not finite, or a spike. A pure
// function of the losses and gradient norms so far; its state is in the checkpoint.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "checkpoint/state_reader.h"
#include "config/config.h"

namespace sluice {

/// The loss of a model that gives all tokens the same probability: ln(vocabulary).
inline double uniform_loss(const ModelConfig& model) {
  return std::log(static_cast<double>(std::max<int64_t>(model.vocab_size, 2)));
}

/// Finds spikes of one signal in the last 128 of its values that were none. Spikes are never added, so that
/// one does not hide the next. With at least 64 values, x is a spike when
///   x > mean + 6 sigma  and  x > 1.02 mean.
/// Fewer values say little of the deviation, and the start of a training is not level: there x is a spike
/// when
///   x > mean + 6 sigma sqrt(64 / count)  and  x > start_factor max(largest value, start_level).
/// Without values nothing is a spike.
class SpikeDetector {
 public:
  static constexpr int64_t kLength = 128, kWarmUp = 64;

  explicit SpikeDetector(double start_factor, double start_level = 0)
      : start_factor_(start_factor), start_level_(start_level) {}
  bool is_spike(double x) const { return x > limit(); }
  double limit() const;
  void add(double x);

  std::vector<double> values() const;  // oldest first
  void restore(const std::vector<double>& values);

 private:
  int64_t size() const { return added_ < kLength ? added_ : kLength; }
  double at(int64_t i) const {
    return ring_[static_cast<size_t>((added_ - size() + i) % kLength)];
  }  // 0: oldest

  double start_factor_, start_level_;
  std::array<double, kLength> ring_{};
  int64_t added_ = 0;
};

class StepPolicy {
 public:
  enum class Action { apply, skip, stop };
  struct Decision {
    Action action = Action::apply;
    bool finite = true, spike = false;
    bool budget_exhausted = false;  // the action is stop because too many steps were skipped
  };

  /// uniform: uniform_loss() of the model, below which the first losses of random weights do not lie. Those
  /// of trained weights (train.init_from) do, and a spike is judged by them alone.
  StepPolicy(const TrainConfig& config, double uniform)
      : on_nonfinite_(config.on_nonfinite),
        on_spike_(config.on_spike),
        losses_(kStartLoss, config.init_from.empty() ? uniform : 0),
        grad_norms_(kStartNorm) {}

  /// What to do with one step; counts it, and adds values that are no spikes to the detectors. More than 10
  /// skipped steps in a row, or more than 1 % of the last 1,000, mean stop.
  Decision decide(int64_t step, double loss, double grad_norm);

  /// The limits by which the device decides whether the next step is applied, before the host knows its loss:
  /// the same as decide(). Infinity where spikes are applied.
  double loss_limit() const { return on_spike_ == BadStepPolicy::count ? kNone : losses_.limit(); }
  double grad_norm_limit() const { return on_spike_ == BadStepPolicy::count ? kNone : grad_norms_.limit(); }

  int64_t spikes() const { return spikes_; }
  int64_t skipped() const { return skipped_; }

  nlohmann::json state() const;
  /// steps_done: of the checkpoint that the state is from.
  void restore(const StateReader& state, int64_t steps_done);

 private:
  static constexpr double kNone = std::numeric_limits<double>::infinity();
  // In 40 healthy runs with batches of 64 and 256 tokens a loss of the first 64 steps was up to 1.45 times
  // the larger of the largest before it and the uniform loss, a gradient norm up to 23 times.
  static constexpr double kStartLoss = 1.5, kStartNorm = 100;
  // The 11 latest skipped steps: 11 within 1,000 is more than 1 %, and covers 11 in a row.
  static constexpr int64_t kBudget = 10, kBudgetWindow = 1000;
  bool skip_exhausts_budget(int64_t step);

  BadStepPolicy on_nonfinite_, on_spike_;
  SpikeDetector losses_, grad_norms_;
  int64_t spikes_ = 0, skipped_ = 0;
  std::array<int64_t, kBudget + 1>
      skipped_steps_{};  // ring, entry skipped_ % 11 is the next to be overwritten
};

}  // namespace sluice
