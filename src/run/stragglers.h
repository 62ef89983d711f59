#pragma once
// Reports ranks that repeatedly keep the others waiting (README.md). It only reports them.
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

/// Input are the seconds that every rank computes in a step, without waiting times. Each rank has a moving
/// average, in which one step counts at most twice the average so far. A rank whose average exceeds 1.2 times
/// the median (the lower one for an even number of ranks) in 30 of the last 50 steps is a straggler.
class Stragglers {
 public:
  static constexpr int kWindow = 50, kSlowSteps = 30, kIgnored = 2;  // the first steps touch new memory
  static constexpr double kFactor = 1.2, kWeight = 0.125, kChange = 1.25;

  explicit Stragglers(int ranks) : ranks_(static_cast<size_t>(ranks)) {}

  /// Takes seconds[r] of rank r in one more step and returns messages: a rank is reported once, and again
  /// when its factor has changed by more than a quarter or when it is no longer a straggler.
  std::vector<std::string> add(const std::vector<double>& seconds);

 private:
  struct Rank {
    double average = 0;
    std::array<bool, kWindow> slow{};
    int slow_steps = 0;
    double reported = 0;  // the factor last reported; 0: none
  };
  std::vector<Rank> ranks_;
  int64_t steps_ = 0;
};

}  // namespace sluice
