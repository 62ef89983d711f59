#include "analysis/gate_health.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "analysis/reading.h"
#include "core/parallel_for.h"

namespace sluice {
namespace {

/// Counts, which are exact in any order.
template <class S>
void count_scores(GateHealthSums& sums, const S* scores, int64_t rows, int64_t heads, int64_t channels,
                  double weight) {
  parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      int64_t below = 0, above = 0, shut = 0;
      for (int64_t t = 0; t < rows; ++t) {
        const S* of_head = scores + (t * heads + h) * channels;
        double sum = 0;
        for (int64_t d = 0; d < channels; ++d) {
          const auto x = static_cast<double>(of_head[d]);
          below += x < kShutBelow;
          above += x > kOpenAbove;
          sum += x;
        }
        shut += sum < kShutBelow * static_cast<double>(channels);
      }
      const auto i = static_cast<size_t>(h);
      sums.below[i] += weight * static_cast<double>(below);
      sums.above[i] += weight * static_cast<double>(above);
      sums.shut[i] += weight * static_cast<double>(shut);
    }
  });
}

}  // namespace

int64_t gate_heads(const ModelConfig& config, GatePosition position) {
  switch (position) {
    case GatePosition::query:
    case GatePosition::sdpa_output:
      return config.num_attention_heads;
    case GatePosition::key:
    case GatePosition::value:
      return config.num_key_value_heads;
    case GatePosition::dense_output:
      return 1;
  }
  return 1;
}

GateHealthSums::GateHealthSums(int64_t heads) {
  for (auto* x : {&below, &above, &shut}) x->assign(static_cast<size_t>(heads), 0);
}

void GateHealthSums::add(Context& ctx, const Tensor& scores, int64_t T) {
  const int64_t rows = scores.dim(0), heads = scores.dim(1), width = scores.numel() / (rows * heads);
  SLUICE_CHECK(heads == std::ssize(below), "GateHealthSums: {} heads, expected {}", heads, below.size());
  const HostView view(ctx, scores);
  if (ctx.dry_run) return;
  // A learned constant's one row stands for every token.
  const double weight = rows == 1 ? static_cast<double>(T) : 1;
  if (scores.dtype == DType::f64)
    count_scores(*this, view.tensor().as<double>(), rows, heads, width, weight);
  else
    count_scores(*this, view.tensor().as<float>(), rows, heads, width, weight);
  tokens += static_cast<double>(T);
  channels = static_cast<double>(width);
}

void GateHealthSums::add_parts(Parts& parts) {
  add_part(parts, Merge::sum, tokens);
  add_part(parts, Merge::largest, channels);
  for (auto* x : {&below, &above, &shut}) add_part(parts, Merge::sum, *x);
}

int64_t GateHealth::shut_heads() const {
  return std::count_if(shut_tokens.begin(), shut_tokens.end(), [](double x) { return x > kShutTokens; });
}

GateShares shares_of(const std::vector<GateHealth>& gates) {
  GateShares shares;
  double heads = 0;
  for (const GateHealth& gate : gates) {
    heads += static_cast<double>(gate.below.size());
    shares.shut_heads += static_cast<double>(gate.shut_heads());
    for (const double x : gate.below) shares.below += x;
    for (const double x : gate.above) shares.above += x;
  }
  for (double* x : {&shares.below, &shares.above, &shares.shut_heads}) *x /= heads;
  return shares;
}

GateHealth health_of(const GateHealthSums& sums, std::vector<double> row_norms) {
  GateHealth health;
  health.row_norms = std::move(row_norms);
  if (sums.tokens == 0) return health;
  for (const double x : sums.below) health.below.push_back(x / (sums.tokens * sums.channels));
  for (const double x : sums.above) health.above.push_back(x / (sums.tokens * sums.channels));
  for (const double x : sums.shut) health.shut_tokens.push_back(x / sums.tokens);
  return health;
}

std::vector<std::vector<double>> gate_row_norms(Context& ctx, const ParamStore& store, size_t layer,
                                                const ModelConfig& config) {
  // The weights of a layer's gates are registered in their order, as "gate", "gate_proj_2", "value_gate_proj"
  // and so on.
  const std::vector<GateConfig>& gates = config.attention.gates;
  const std::string prefix = fmt::format("model.layers.{}.self_attn.", layer);
  std::vector<std::vector<double>> norms;
  for (size_t i = 0; i < store.specs().size(); ++i) {
    const std::string& name = store.specs()[i].name;
    if (!name.starts_with(prefix) || name.find("gate", prefix.size()) == std::string::npos ||
        name.ends_with(".bias") || name.find(".lora_") != std::string::npos)
      continue;
    SLUICE_CHECK(norms.size() < gates.size(), "gate_row_norms: {} is the weight of no gate", name);
    const int64_t heads = gate_heads(config, gates[norms.size()].position);
    const std::vector<double> weight = read_values(ctx, store.value(static_cast<ParamStore::Id>(i)));
    const size_t of_head = weight.size() / static_cast<size_t>(heads);
    norms.emplace_back();
    for (auto row = weight.begin(); row != weight.end(); row += static_cast<int64_t>(of_head)) {
      double squares = 0;
      for (size_t k = 0; k < of_head; ++k)
        squares += row[static_cast<int64_t>(k)] * row[static_cast<int64_t>(k)];
      norms.back().push_back(std::sqrt(squares));
    }
  }
  SLUICE_CHECK(norms.size() == gates.size(), "gate_row_norms: layer {} has {} gates and {} weights of gates",
               layer, gates.size(), norms.size());
  return norms;
}

}  // namespace sluice
