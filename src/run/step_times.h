#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

namespace sluice {

/// The latest step times. Their median is robust against occasional load on the machine.
class StepTimes {
 public:
  void add(double seconds) { times_[static_cast<size_t>(count_++) % times_.size()] = seconds; }
  int64_t count() const { return count_; }
  double median() const {
    std::array<double, 101> copy = times_;
    const auto n = std::min<int64_t>(count_, static_cast<int64_t>(copy.size()));
    if (n == 0) return 0;
    std::nth_element(copy.begin(), copy.begin() + n / 2, copy.begin() + n);
    return copy[static_cast<size_t>(n / 2)];
  }

 private:
  std::array<double, 101> times_{};
  int64_t count_ = 0;
};

}  // namespace sluice
