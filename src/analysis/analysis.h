#pragma once
// The results of `sluice analyze` as JSON and arrays. Only here are sums divided to means.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "analysis/maps.h"
#include "analysis/statistics.h"

namespace sluice {

struct Analysis {
  struct Set {
    std::string name;
    Statistics sums;
    int64_t padded = 0;  // samples that were left out since they end in padding
  };
  std::string checkpoint = {};
  int64_t step = 0, trained_tokens = 0;
  std::vector<Set> sets;
  Statistics total;  // of all sets, weighted by their tokens
  SecondPass second;
  AttentionMaps maps;
  /// Per layer, gate and head: gate_row_norms().
  std::vector<std::vector<std::vector<double>>> gate_row_norms = {};
  std::vector<int32_t> map_tokens = {};    // (sequences, M): token ids in maps and planes
  std::vector<std::string> map_sets = {};  // (sequences): set of each sequence
};

/// Reported quantiles of gate scores, from the fine histogram: accurate to one bin, 1 / kFineBins of its
/// range.
constexpr std::array<double, 7> kQuantiles = {0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99};
/// The `share` quantile of bins over [low, high].
double quantile(const std::vector<double>& bins, double low, double high, double share);

/// All numbers except the arrays; values that do not exist (gate scores without gates) are null. Fractions
/// are in [0, 1], imbalances are given with ddof 1 and ddof 0, and standard deviations are those of the
/// population.
nlohmann::ordered_json to_json(const Analysis& analysis);

/// Writes the arrays and then analysis.json into an existing folder.
void write_analysis(const std::string& folder, const Analysis& analysis);

}  // namespace sluice
