#pragma once
// `sluice ruler`: runs a trained model on RULER's tasks (ruler_tasks.h) and keeps every answer, so that a run
// that was cut short goes on.
#include <functional>
#include <vector>

#include "eval/batch_generate.h"
#include "eval/ruler_files.h"

namespace sluice {

/// One prompt to be answered.
struct RulerItem {
  RulerTask task;
  int64_t length = 0, sample = 0;
  RulerPrompt prompt;
};

/// All prompts of a task at a length; made when they are needed.
struct RulerCell {
  RulerTask task;
  int64_t length = 0, samples = 0;
  std::function<RulerPrompt(int64_t sample)> prompt;
};

/// Of the prompts of every cell that the results lacked at the start, a part in turn.
struct RulerShare {
  int64_t rank = 0, ranks = 1;
};

/// Answers this share of what the results lack, as many prompts at once as the model keeps sequences. `stop`
/// is asked after each answer; false if it ended the run. `progress` is called for every answer.
/// Error(usage): a prompt with what is generated is longer than the model's context.
bool run_ruler(CachedModel& model, const Tokenizer& tokenizer, std::optional<int32_t> begin_token,
               const std::vector<RulerCell>& cells, const RulerShare& share, RulerResults& results,
               const std::function<void(const RulerAnswer&)>& progress, const std::function<bool()>& stop);

}  // namespace sluice
