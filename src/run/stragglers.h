#pragma once
// Ranks that keep the others waiting step after step (README.md): named, and nothing else.
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace sluice {

/// From the seconds that every rank computes in a step, without waiting for others: of each a moving average,
/// in which one step counts for at most twice the average so far. A rank whose average is more than 1.2 times
/// the median (of an even number of ranks, the lower one) in 30 of the last 50 steps is a straggler.
class Stragglers {
 public:
  static constexpr int kWindow = 50, kSlowSteps = 30, kIgnored = 2;  // the first steps touch new memory
  static constexpr double kFactor = 1.2, kWeight = 0.125, kChange = 1.25;

  explicit Stragglers(int ranks) : ranks_(static_cast<size_t>(ranks)) {}

  /// seconds[r] of rank r in one more step. What there is to say: a rank is named once, and again when its
  /// factor has changed by more than a quarter, or when it keeps up again.
  std::vector<std::string> add(const std::vector<double>& seconds);

 private:
  struct Rank {
    double average = 0;
    std::array<bool, kWindow> slow{};
    int slow_steps = 0;
    double told = 0;  // the factor it was named with; 0: it is not
  };
  std::vector<Rank> ranks_;
  int64_t steps_ = 0;
};

}  // namespace sluice
