#pragma once
// Detects divergence: a loss that rises and stays high, even if no single step is a spike. A pure function of
// the losses so far; its state is in the checkpoint.
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "checkpoint/state_reader.h"

namespace sluice {

/// The loss is smoothed over about 50 steps (an exponential mean, corrected for its start). It has diverged
/// if the smoothed loss
///   - exceeds `factor` times the lowest smoothed loss so far, and by at least 0.2 nats; until 16 steps have
///     been seen, the larger of the first loss and `chance` replaces the lowest; or
///   - exceeds `chance` by 2 % at least 64 steps after warm-up: the model is worse than a uniform guess.
/// It has recovered if neither holds with half of `factor`'s excess.
class Divergence {
 public:
  /// factor: train.divergence_factor, 0: the first rule never holds. chance: ln(vocabulary).
  Divergence(double factor, double chance, int64_t warmup_steps)
      : factor_(factor), chance_(chance), warmup_steps_(warmup_steps) {}

  /// Takes the loss of a step, counted from 1. Returns a warning if the loss diverges at this step, a note if
  /// it has recovered, otherwise "".
  std::string add(int64_t step, double loss);

  /// The step since which the loss has diverged; nothing if it has not, or has recovered.
  std::optional<int64_t> since() const { return since_ > 0 ? std::optional(since_) : std::nullopt; }
  /// "the smoothed loss is 22.90 and was as low as 5.55; the loss of a uniform guess, ln(vocabulary),
  /// is 5.55".
  std::string describe() const;
  double smoothed() const;

  nlohmann::json state() const;
  void restore(const StateReader& state);

 private:
  static constexpr double kDecay = 0.98, kLeastRise = 0.2, kAboveChance = 1.02;
  static constexpr int64_t kSettled = 16, kAfterWarmup = 64;
  /// The limit of the smoothed loss under the first rule for a given factor.
  double limit(double factor) const;

  double factor_, chance_;
  int64_t warmup_steps_;
  int64_t count_ = 0;              // losses seen
  double sum_ = 0, weight_ = 0;    // of the smoothing
  double first_ = 0, lowest_ = 0;  // lowest: minimum of the smoothed losses since kSettled
  int64_t since_ = 0;
};

}  // namespace sluice
