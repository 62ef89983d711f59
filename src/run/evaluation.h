#pragma once
// An evaluation between two steps of a training, on one rank or on all.
#include <functional>

#include "eval/evaluate.h"
#include "run/signals.h"
#include "train/trainer.h"

namespace sluice {

/// Collective. Where a forward pass needs all ranks, all evaluate together; otherwise rank 0 alone.
/// `computes` is called by the ranks that compute before they begin, `report` by rank 0 with the result.
/// False where a signal cut it short: the next start makes it up, with the same weights. Throws SharedError
/// where the data or the report of any rank failed.
bool evaluate_between_steps(const Evaluator& evaluator, Trainer& trainer, const StopSignals& signals,
                            const std::function<void()>& computes,
                            const std::function<void(const EvalResult&)>& report);

}  // namespace sluice
