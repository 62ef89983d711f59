#pragma once
// Watches the expert load and warns when a router collapses (README.md): experts without tokens, or one
// expert with most of the tokens.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/state_reader.h"
#include "nn/router_load.h"

namespace sluice {

class RouterMonitor {
 public:
  static constexpr int64_t kIdleSteps = 100, kSkewedSteps = 20, kSilence = 1000;

  explicit RouterMonitor(const ModelConfig& model);

  /// Takes the load of one step. Returns warnings, one line each: for a layer whose experts were idle for 100
  /// consecutive steps, or whose load was skewed for 20 (the busiest expert at 8 times the mean, or at 80 %
  /// of the maximum). A warning is repeated after 1,000 steps.
  std::vector<std::string> add(int64_t step, const RouterSummary& summary);

  /// State for a checkpoint's state.json, as router.layers: the counters, and the tokens of every expert in
  /// the last step.
  void save(nlohmann::json& state) const;
  /// Restores the state; starts from zero if it is absent or has another shape.
  void restore(const StateReader& state);

 private:
  static constexpr int64_t kMostSteps = int64_t{1} << 53;
  struct Layer {
    int64_t layer = 0;
    std::vector<int64_t> idle_steps, counts;  // per expert
    int64_t skewed_steps = 0, told_at = -kSilence;
  };
  MoeConfig config_;
  std::vector<Layer> layers_;
};

}  // namespace sluice
