#pragma once
// `sluice eval --tasks`: multiple-choice tasks by log-likelihood.
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "command.h"
#include "eval/tasks.h"
#include "hf/open.h"

namespace sluice {

struct EvalTasksOptions {
  std::vector<std::string> files;
  TaskOptions task;
};

void add_task_options(Command& command, EvalTasksOptions& options);

/// Collective. Answers every task of a run, checkpoint or Hugging Face folder; rank 0 prints a table, or one
/// line of JSON.
void evaluate_tasks(Communicator& ranks, const std::string& model, const OpenOptions& how,
                    const EvalTasksOptions& options, bool json);

}  // namespace sluice
