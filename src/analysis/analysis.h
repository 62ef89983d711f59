#pragma once
// All that `sluice analyze` knows of a model, as JSON and arrays: the one place where sums become means.
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
  };
  std::string checkpoint = {};
  int64_t step = 0, trained_tokens = 0;
  std::vector<Set> sets;
  Statistics total;  // of all sets: each counts by its tokens
  SecondPass second;
  AttentionMaps maps;
  std::vector<int32_t> map_tokens = {};    // (sequences, M): the token ids that maps and planes show
  std::vector<std::string> map_sets = {};  // (sequences): which set each is from
};

/// Quantiles told of gate scores, from the fine histogram: exact to a bin, 1 / kFineBins of its range.
constexpr std::array<double, 7> kQuantiles = {0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99};
/// The `share` quantile of bins over [low, high].
double quantile(const std::vector<double>& bins, double low, double high, double share);

/// Every number but the arrays; what does not exist (a gate score without gates) is null. Shares are of 1,
/// imbalances with ddof 1 beside ddof 0, deviations those of the population.
nlohmann::ordered_json to_json(const Analysis& analysis);

/// Writes the arrays and then analysis.json into an existing folder.
void write_analysis(const std::string& folder, const Analysis& analysis);

}  // namespace sluice
