#pragma once
// How eval.jsonl and analysis.json write the measures that both hold (keys: README.md). What was not counted
// is null.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "analysis/first_token.h"
#include "analysis/gate_health.h"
#include "analysis/selection.h"

namespace sluice {

/// `classes`: the names of means.by_class.
nlohmann::ordered_json to_json(const HeadAttention& means, const std::vector<std::string>& classes);
nlohmann::ordered_json to_json(const SinkSummary& sinks, const std::vector<std::string>& classes,
                               double threshold, int64_t length);
nlohmann::ordered_json to_json(const GateHealth& gate);
nlohmann::ordered_json to_json(const SelectionSummary& selection);

}  // namespace sluice
