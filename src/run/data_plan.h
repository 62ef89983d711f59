#pragma once
// How often a training will see its data.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/loader.h"

namespace sluice {

/// Repeating data up to about four times is nearly as good as new data; beyond that the gain falls off
/// quickly (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
constexpr double kManyEpochs = 4;

/// The training sources, as `sluice plan` shows them.
struct DataPlan {
  struct Source {
    Blend::SourceInfo info;
    double epochs = 0;
  };
  std::vector<Source> sources;
  std::string problem;  // why they could not be opened; they need not be there for a plan
};
DataPlan plan_data(const Config& config, int64_t steps);
std::string data_plan_text(const DataPlan& plan);
nlohmann::json data_plan_json(const DataPlan& plan);

/// One for every source that a training of so many samples passes over more than kManyEpochs times.
std::vector<std::string> repetition_warnings(const Blend& data, int64_t samples);

}  // namespace sluice
