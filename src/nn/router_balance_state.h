#pragma once
// State of the routers between steps: the counts of a step and of the previous step (model.moe.load_balance).
#include <optional>

#include "nn/moe.h"
#include "nn/router_load.h"
#include "nn/step_loss.h"

namespace sluice {

/// A StepLoss (nn/step_loss.h). It has no state for a dense model.
class RouterBalanceState : public NoStepLoss {
 public:
  explicit RouterBalanceState(const Config& config)
      : config_(config.model), shares_experts_(config.parallel.expert > 1) {}
  void allocate(const StepMemory& memory);
  template <class Load>
  void add_to(Load& load) const {
    load.routers = load_;
  }
  bool asks_ranks() const { return load_.counts || load_.sequences; }

  void begin_step(Context& ctx);
  void fetch(Context& ctx);
  /// Counts are whole numbers, so their sums do not depend on the distribution over ranks.
  void collect(Communicator& ranks, int64_t counted_tokens);
  void applied(Context& ctx);

  /// (layers, router_totals_size(E)) f64 on the host: the last step's, of all ranks, after collect; empty
  /// without experts.
  const Tensor& totals() const { return host_totals_; }
  std::optional<RouterSummary> summary() const { return summarize_router(config_, host_totals_); }
  /// Total number of extra rounds that expert parallelism needed so far.
  int64_t extra_rounds() const { return extra_rounds_; }
  std::vector<StepScalar> scalars() const;

  void save(nlohmann::json& state) const;
  void restore(const StateReader& state);

 private:
  ModelConfig config_;
  bool shares_experts_;  // between ranks
  RouterLoad load_;
  int64_t extra_rounds_ = 0;
  Tensor host_totals_, host_previous_;  // on a CPU, the load's
};

}  // namespace sluice
