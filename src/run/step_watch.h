#pragma once
// What is watched from step to step, and what is said about it: skipped steps, a loss that diverges, routers
// that collapse, experts whose rows take extra rounds.
#include <memory>
#include <nlohmann/json.hpp>

#include "config/config.h"
#include "run/console.h"
#include "run/divergence.h"
#include "run/router_monitor.h"
#include "train/trainer.h"

namespace sluice {

class StepWatch {
 public:
  explicit StepWatch(const Config& config);

  /// After a step: warns, and remembers. By the rank that reports.
  void add(const StepMetrics& m, const Trainer& trainer, Console& console);

  const Divergence& divergence() const { return divergence_; }

  /// Into the state of a checkpoint, and out of it.
  void save_to(nlohmann::json& state) const;
  void restore(const StateReader& state);

 private:
  void watch_routers(const RouterBalanceState& routers, int64_t step);
  Divergence divergence_;
  std::unique_ptr<RouterMonitor> monitor_;  // with experts
  bool warned_of_rounds_ = false;
};

}  // namespace sluice
