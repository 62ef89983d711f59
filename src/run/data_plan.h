#pragma once
// What a run reads of its training data, and how often.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/loader.h"

namespace sluice {

/// Up to about four epochs, repeated data is nearly as good as new data; beyond that the benefit decreases
/// quickly (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
constexpr double kManyEpochs = 4;

/// The training sources, as `sluice plan` shows them.
struct DataPlan {
  struct Source {
    Blend::SourceInfo info;
    double epochs = 0;
  };
  std::vector<Source> sources;
  std::string problem;  // why they could not be opened; a plan does not need them
};
DataPlan plan_data(const Config& config, int64_t steps);
std::string data_plan_text(const DataPlan& plan);
nlohmann::json data_plan_json(const DataPlan& plan);

/// One warning for each source with files that no sample is made of, and one for each that a run of this many
/// samples repeats for more than kManyEpochs epochs.
std::vector<std::string> data_warnings(const Blend& data, int64_t samples);

}  // namespace sluice
