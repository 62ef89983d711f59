#pragma once
// Watches the experts' loads of a run and tells when a router collapses (README.md): experts that no
// token reaches, or one expert that most tokens reach.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "analysis/router_load.h"
#include "checkpoint/state_reader.h"

namespace sluice {

class RouterMonitor {
 public:
  static constexpr int64_t kIdleSteps = 100, kSkewedSteps = 20, kSilence = 1000;

  explicit RouterMonitor(const ModelConfig& model);

  /// One step's loads. Returns warnings, a line each: a layer is told of when experts were idle for 100 steps
  /// on end or its load was skewed for 20 (the busiest expert at 8 times the mean, or at 80 % of what is
  /// possible), and again after 1,000.
  std::vector<std::string> add(int64_t step, const RouterSummary& summary);

  /// For the checkpoint: what is being counted, and the last step's tokens of every expert.
  nlohmann::json state() const;
  /// Of a state without it, or of another shape: starts anew.
  void restore(const std::vector<StateReader>& layers);

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
