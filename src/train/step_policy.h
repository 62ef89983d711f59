#pragma once
// Decides whether a step's update is applied, and the reaction if it is not (README.md). A pure function of
// the losses and gradient norms so far; its state is in the checkpoint.
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

/// The loss of a uniform guess: ln(vocabulary).
inline double chance_loss(const ModelConfig& model) {
  return std::log(static_cast<double>(std::max<int64_t>(model.vocab_size, 2)));
}

/// The last 128 accepted finite values of one signal. x is a spike if at least 64 values have been accepted
/// and x > mean + 6 sigma and x > 1.02 mean. Spikes are not added, so that one does not hide the next. With
/// fewer values a deviation says less, and the beginning of a training is not level: there x is a spike when
/// x > mean + 6 sigma sqrt(64 / count) and x > early_factor times the largest value so far (or `usual`, if
/// that is larger). Where none has been accepted nothing is a spike: nothing has been learned that could be
/// lost.
class SpikeWindow {
 public:
  static constexpr int64_t kLength = 128, kWarmUp = 64;

  explicit SpikeWindow(double early_factor, double usual = 0) : early_factor_(early_factor), usual_(usual) {}
  bool is_spike(double x) const { return x > limit(); }
  double limit() const;
  void accept(double x);

  std::vector<double> values() const;  // oldest first
  void restore(const std::vector<double>& values);

 private:
  int64_t size() const { return accepted_ < kLength ? accepted_ : kLength; }
  double at(int64_t i) const {
    return ring_[static_cast<size_t>((accepted_ - size() + i) % kLength)];
  }  // 0: oldest

  double early_factor_, usual_;
  std::array<double, kLength> ring_{};
  int64_t accepted_ = 0;
};

class StepPolicy {
 public:
  enum class Verdict { apply, skip, stop };
  struct Judgement {
    Verdict verdict = Verdict::apply;
    bool finite = true, spike = false;
    bool budget_exhausted = false;  // verdict is stop because too many steps were skipped
  };

  /// chance: chance_loss() of the model.
  StepPolicy(const TrainConfig& config, double chance)
      : on_nonfinite_(config.on_nonfinite),
        on_spike_(config.on_spike),
        losses_(kEarlyLoss, chance),
        grad_norms_(kEarlyNorm) {}

  /// Judges and counts one step, and adds accepted values to the windows. Skipping more than 10 steps in a
  /// row, or more than 1 % of the last 1,000, means stop.
  Judgement judge(int64_t step, double loss, double grad_norm);

  /// Above these limits the next step is not applied; infinity if spikes are applied. The device compares
  /// with them; judge() decides the reaction.
  double loss_limit() const { return on_spike_ == BadStepPolicy::count ? kNone : losses_.limit(); }
  double grad_norm_limit() const { return on_spike_ == BadStepPolicy::count ? kNone : grad_norms_.limit(); }

  int64_t spikes() const { return spikes_; }
  int64_t skipped() const { return skipped_; }

  nlohmann::json state() const;
  /// steps_done: of the checkpoint that the state is from.
  void restore(const StateReader& state, int64_t steps_done);

 private:
  static constexpr double kNone = std::numeric_limits<double>::infinity();
  // Of 40 healthy runs with batches of 64 and 256 tokens a loss of the first 64 steps was up to 1.45 times
  // the largest before it (or that of guessing), a gradient norm up to 23 times.
  static constexpr double kEarlyLoss = 1.5, kEarlyNorm = 100;
  // The 11 latest skipped steps: 11 within 1,000 is more than 1 %, and covers 11 in a row.
  static constexpr int64_t kBudget = 10, kBudgetWindow = 1000;
  bool skip_exhausts_budget(int64_t step);

  BadStepPolicy on_nonfinite_, on_spike_;
  SpikeWindow losses_, grad_norms_;
  int64_t spikes_ = 0, skipped_ = 0;
  std::array<int64_t, kBudget + 1>
      skipped_steps_{};  // ring, entry skipped_ % 11 is the next to be overwritten
};

}  // namespace sluice
