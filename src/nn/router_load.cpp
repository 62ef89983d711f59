#include "nn/router_load.h"

#include <algorithm>
#include <cmath>

#include "ops/router.h"

namespace sluice {
namespace {

LayerLoad load_of(const double* totals, int64_t experts, BalanceScope scope) {
  LayerLoad load;
  const double tokens = totals[2 * experts + 2], n = static_cast<double>(experts);
  double pairs = 0, squares = 0, largest = 0;
  for (int64_t e = 0; e < experts; ++e) {
    pairs += totals[e];
    squares += totals[e] * totals[e];
    largest = std::max(largest, totals[e]);
    load.idle += totals[e] == 0;
    load.counts.push_back(static_cast<int64_t>(totals[e]));
  }
  const double mean = pairs / n;
  double global = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const double share = totals[e] / pairs;
    if (share > 0) load.entropy -= share * std::log(share) / std::log(n);
    global += n * share * totals[experts + e] / tokens;
  }
  load.max_over_mean = largest / mean;
  load.variation = std::sqrt(std::max(squares / n - mean * mean, 0.0)) / mean;
  load.balance_loss = scope != BalanceScope::micro_batch ? global : totals[2 * experts] / tokens;
  load.z_loss = totals[2 * experts + 1] / tokens;
  return load;
}

}  // namespace

std::optional<RouterSummary> summarize_router(const ModelConfig& model, const Tensor& totals) {
  if (!totals) return std::nullopt;
  const int64_t experts = model.moe.num_experts, width = totals.dim(1);
  RouterSummary summary;
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    const double* row = totals.as<double>() + layer * width;
    if (!model.moe.in_layer(layer) || row[2 * experts + 2] == 0) continue;
    LayerLoad load = load_of(row, experts, model.moe.load_balance.scope);
    load.layer = layer;
    summary.max_over_mean = std::max(summary.max_over_mean, load.max_over_mean);
    summary.idle += load.idle;
    summary.balance_loss += load.balance_loss;
    summary.z_loss += load.z_loss;
    summary.layers.push_back(std::move(load));
  }
  if (summary.layers.empty()) return std::nullopt;
  summary.balance_loss /= static_cast<double>(summary.layers.size());
  summary.z_loss /= static_cast<double>(summary.layers.size());
  return summary;
}

}  // namespace sluice
