#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace sluice {

double learning_rate(const OptimizerConfig& config, int64_t step, int64_t max_steps) {
  const int64_t warmup = config.warmup_steps;
  if (step < warmup) return config.lr * static_cast<double>(step) / static_cast<double>(warmup);

  // How far between `begin` and max_steps, 0 to 1.
  const auto progress = [&](int64_t begin) {
    if (step >= max_steps) return 1.0;
    return step <= begin ? 0.0 : static_cast<double>(step - begin) / static_cast<double>(max_steps - begin);
  };
  const auto fall = [&](double done) { return config.lr + (config.min_lr - config.lr) * done; };
  switch (config.schedule) {
    case Schedule::constant:
      return config.lr;
    case Schedule::linear:
      return fall(progress(warmup));
    case Schedule::cosine:
      return fall(0.5 - 0.5 * std::cos(std::numbers::pi * progress(warmup)));
    case Schedule::wsd: {
      const int64_t decay = config.decay_steps > 0 ? config.decay_steps : std::max<int64_t>(max_steps / 5, 1);
      return fall(progress(std::max(warmup, max_steps - decay)));
    }
  }
  return config.lr;
}

}  // namespace sluice
