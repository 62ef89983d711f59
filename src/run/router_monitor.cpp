#include "run/router_monitor.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>

#include "config/fields.h"

namespace sluice {

RouterMonitor::RouterMonitor(const ModelConfig& model) : config_(model.moe) {
  const auto experts = static_cast<size_t>(config_.num_experts);
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer)
    if (config_.in_layer(layer)) {
      Layer& l = layers_.emplace_back();
      l.layer = layer;
      l.idle_steps.assign(experts, 0);
      l.counts.assign(experts, 0);
    }
}

std::vector<std::string> RouterMonitor::add(int64_t step, const RouterSummary& summary) {
  std::vector<std::string> warnings;
  const double most =
      static_cast<double>(config_.num_experts) / static_cast<double>(config_.num_experts_per_tok);
  const double skewed = std::min(8.0, 0.8 * most);
  for (size_t i = 0; i < std::min(layers_.size(), summary.layers.size()); ++i) {
    Layer& layer = layers_[i];
    const LayerLoad& load = summary.layers[i];
    layer.counts = load.counts;
    int64_t idle = 0;
    for (size_t e = 0; e < layer.counts.size(); ++e) {
      layer.idle_steps[e] = layer.counts[e] == 0 ? layer.idle_steps[e] + 1 : 0;
      idle += layer.idle_steps[e] >= kIdleSteps;
    }
    // If every token goes to every expert, the load cannot be skewed.
    layer.skewed_steps = most > 1 && load.max_over_mean >= skewed ? layer.skewed_steps + 1 : 0;
    const bool is_skewed = layer.skewed_steps >= kSkewedSteps;
    if ((idle == 0 && !is_skewed) || step - layer.told_at < kSilence) continue;
    layer.told_at = step;
    std::string what;
    if (idle > 0)
      what = fmt::format("{} of {} experts received no tokens for {} steps, ", idle, config_.num_experts,
                         kIdleSteps);
    const LoadBalanceConfig& balance = config_.load_balance;
    warnings.push_back(fmt::format(
        "router of layer {}: {}max/mean load {:.1f}{} (model.moe.load_balance: coefficient {}, scope {}); {}",
        load.layer, what, load.max_over_mean, is_skewed ? fmt::format(" for {} steps", kSkewedSteps) : "",
        scalar_text(balance.coefficient), enum_name(balance.scope),
        balance.coefficient < 1e-2 ? "consider coefficient 1e-2"
                                   : "consider a larger coefficient or a lower learning rate"));
  }
  return warnings;
}

void RouterMonitor::save(nlohmann::json& state) const {
  nlohmann::json layers = nlohmann::json::array();
  for (const Layer& l : layers_)
    layers.push_back({{"layer", l.layer},
                      {"counts", l.counts},
                      {"idle_steps", l.idle_steps},
                      {"skewed_steps", l.skewed_steps},
                      {"told_at", l.told_at}});
  state["router"]["layers"] = layers;
}

void RouterMonitor::restore(const StateReader& state) {
  if (!state.has("router")) return;
  const bool old = state.is_list("router");  // until version 0.1 the list itself
  if (!old && !state.object("router").has("layers")) return;
  std::vector<Layer> restored;
  for (const StateReader& s : old ? state.objects("router") : state.object("router").objects("layers")) {
    Layer& l = restored.emplace_back();
    l.layer = s.integer("layer", 0);
    l.counts = s.integers("counts", StateReader::kAnyCount, 0);
    l.idle_steps = s.integers("idle_steps", std::ssize(l.counts), 0, kMostSteps);
    l.skewed_steps = s.integer("skewed_steps", 0, kMostSteps);
    l.told_at = s.integer("told_at", -kSilence, kMostSteps);
  }
  const bool same = std::equal(restored.begin(), restored.end(), layers_.begin(), layers_.end(),
                               [](const Layer& a, const Layer& b) {
                                 return a.layer == b.layer && a.counts.size() == b.counts.size();
                               });
  if (same) layers_ = std::move(restored);
}

}  // namespace sluice
