#include "config/task_rules.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <limits>

namespace sluice {

void check_tasks(const Config& config, ProblemSink& problem) {
  const EvalConfig& e = config.eval;
  if (e.shots < 0) problem({"eval.shots"}, fmt::format("eval.shots must not be negative, got {}", e.shots));
  if (e.max_questions < 0)
    problem({"eval.max_questions"},
            fmt::format("eval.max_questions must not be negative, got {}", e.max_questions));
  if (e.prompt_tokens < 1)
    problem({"eval.prompt_tokens"},
            fmt::format("eval.prompt_tokens must be at least 1, got {}", e.prompt_tokens));
  if (e.prompt_tokens > std::numeric_limits<int32_t>::max())
    problem({"eval.prompt_tokens"}, fmt::format("eval.prompt_tokens is too large: {}", e.prompt_tokens));
  if (config.data.validation.empty() && !(e.tasks.empty() && e.prompts.empty()))
    problem({e.tasks.empty() ? "eval.prompts" : "eval.tasks", "data.validation"},
            "eval.tasks and eval.prompts are part of validations, but data.validation names no set");
  const auto has_empty = [](const std::vector<std::string>& list) {
    return std::find(list.begin(), list.end(), "") != list.end();
  };
  if (has_empty(e.prompts)) problem({"eval.prompts"}, "eval.prompts: a prompt is empty");
  if (has_empty(e.tasks)) problem({"eval.tasks"}, "eval.tasks: a file has no name");
}

}  // namespace sluice
