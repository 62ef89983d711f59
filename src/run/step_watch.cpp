#include "run/step_watch.h"

#include <spdlog/spdlog.h>

namespace sluice {

StepWatch::StepWatch(const Config& config)
    : divergence_(config.train.divergence_factor, uniform_loss(config.model), config.optimizer.warmup_steps),
      monitor_(config.model.moe.num_experts > 0 ? std::make_unique<RouterMonitor>(config.model) : nullptr) {}

void StepWatch::add(const StepMetrics& m, const Trainer& trainer, Console& console) {
  const int64_t step = trainer.next_step();
  if (m.skipped) spdlog::warn("{}; skipped", trainer.problem());
  watch_routers(trainer.step_loss<RouterBalanceState>(), step);
  const bool had_diverged = divergence_.since().has_value();
  const std::string message = divergence_.add(step, m.loss);
  if (message.empty()) return;
  if (had_diverged)
    console.line(message);
  else
    spdlog::warn("{}", message);
}

void StepWatch::watch_routers(const RouterBalanceState& routers, int64_t step) {
  if (routers.extra_rounds() > 0 && !warned_of_rounds_)
    spdlog::warn(
        "step {}: rows took {} extra rounds to their experts (said once); fewer with a larger "
        "parallel.expert_capacity",
        step, routers.extra_rounds());
  warned_of_rounds_ = routers.extra_rounds() > 0;
  const auto summary = routers.summary();
  if (!monitor_ || !summary) return;
  for (const std::string& warning : monitor_->add(step, *summary)) spdlog::warn("{}", warning);
}

void StepWatch::save_to(nlohmann::json& state) const {
  state["divergence"] = divergence_.state();
  if (monitor_) monitor_->save(state);
}

void StepWatch::restore(const StateReader& state) {
  if (monitor_) monitor_->restore(state);
  if (state.has("divergence")) divergence_.restore(state.object("divergence"));
}

}  // namespace sluice
