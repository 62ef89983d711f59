#pragma once
// What a run writes down about itself, one JSON object per line (README.md): metrics.jsonl per logged
// step, eval.jsonl per evaluation. Append-only; a resumed run first cuts what lies past the step it resumes
// from.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "eval/evaluate.h"
#include "nn/step_loss.h"

namespace sluice {

struct TrainRecord {
  int64_t step = 0;  // steps done
  int64_t samples = 0, tokens = 0;
  double loss = 0, grad_norm = 0, lr = 0;  // of the last of these steps
  double tokens_per_second = 0;            // since the last record, without evaluation and saving
  double seconds = 0;                      // of training so far, over all resumptions
  int64_t spikes = 0, skipped = 0;
  std::vector<std::pair<std::string, double>> epochs;  // passes over each source so far
  std::optional<int64_t> diverged_since;               // the step since which the loss has diverged
  std::vector<StepScalar> losses;                      // of the last of these steps
};

nlohmann::ordered_json to_json(const TrainRecord& record);
/// Without the log-likelihoods.
nlohmann::ordered_json to_json(const TaskResult& result);
nlohmann::ordered_json to_json(int64_t step, int64_t tokens, const EvalResult& result);

}  // namespace sluice
