#pragma once
// The summary that a run prints before its first step.
#include <string>
#include <vector>

#include "config/config.h"
#include "data/loader.h"
#include "eval/evaluate.h"
#include "plan/plan.h"
#include "train/trainer.h"

namespace sluice {

/// "cpu", or "cuda: NVIDIA H100, 79.6 GiB, compute capability 9.0".
std::string device_text(Device device);

/// Lines on model, data, device, ranks, length and memory (of this rank).
std::vector<std::string> banner(const Config& config, const Plan& plan, Trainer& trainer, const Blend& data,
                                const Evaluator& evaluator);

}  // namespace sluice
