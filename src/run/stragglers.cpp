#include "run/stragglers.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "core/error.h"

namespace sluice {

std::vector<std::string> Stragglers::add(const std::vector<double>& seconds) {
  SLUICE_CHECK(seconds.size() == ranks_.size(), "Stragglers: times of {} ranks, not {}", seconds.size(),
               ranks_.size());
  const int64_t step = steps_++ - kIgnored;
  if (step < 0 || ranks_.size() < 2) return {};
  std::vector<double> averages;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    double& average = ranks_[r].average;
    average = step == 0 ? seconds[r] : (1 - kWeight) * average + kWeight * std::min(seconds[r], 2 * average);
    averages.push_back(average);
  }
  const auto middle = averages.begin() + static_cast<std::ptrdiff_t>((averages.size() - 1) / 2);
  std::nth_element(averages.begin(), middle, averages.end());
  const double median = *middle;

  std::vector<std::string> messages;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    bool& slot = rank.slow[static_cast<size_t>(step % kWindow)];
    rank.slow_steps -= slot;
    slot = rank.average > kFactor * median;
    rank.slow_steps += slot;
    if (rank.slow_steps >= kSlowSteps && slot) {
      const double factor = rank.average / median, change = rank.reported > 0 ? factor / rank.reported : 0;
      if (change > 1 / kChange && change < kChange) continue;
      rank.reported = factor;
      messages.push_back(
          fmt::format("rank {} computes {:.2f} times as long as the median of {} ranks ({} of the last {} "
                      "steps), and all other ranks wait for it: is its machine slower or busier?",
                      r, factor, ranks_.size(), rank.slow_steps, std::min<int64_t>(step + 1, kWindow)));
    } else if (rank.reported > 0 && rank.slow_steps < kWindow - kSlowSteps) {
      rank.reported = 0;
      messages.push_back(fmt::format("rank {} keeps up again", r));
    }
  }
  return messages;
}

}  // namespace sluice
