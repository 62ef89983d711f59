#include "eval_tasks.h"

#include <spdlog/fmt/fmt.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "checkpoint/manifest.h"
#include "config/derived.h"
#include "core/error.h"
#include "core/io.h"
#include "eval/evaluate.h"
#include "eval/forward_memory.h"
#include "eval/trained_model.h"
#include "model_inputs.h"
#include "run/metrics.h"
#include "run/rank_threads.h"

namespace sluice {

void add_task_options(Command& command, EvalTasksOptions& options) {
  command
      .add_option("--tasks", options.files,
                  "multiple-choice questions (JSONL; scripts/benchmarks makes such files), answered by "
                  "log-likelihood instead of the validation sets")
      ->type_name("FILE");
  command
      .add_option("--shots", options.task.shots,
                  "the first questions of each task, solved, stand before every other one (0)")
      ->not_negative()
      ->type_name("N");
  command.add_option("--max-questions", options.task.max_questions, "questions of each task; 0: all")
      ->not_negative()
      ->type_name("N");
}

void evaluate_tasks(Communicator& ranks, const std::string& model, const OpenOptions& how,
                    const EvalTasksOptions& options, bool json) {
  if (ranks.rank() != 0) spdlog::set_level(spdlog::level::err);  // warnings come from rank 0
  std::vector<Task> tasks;
  ModelInputs inputs;
  agree_on_start(ranks, [&](StartFacts& facts) {
    tasks = read_tasks(options.files);
    inputs = read_model(facts, ranks, "eval", model, how);
    std::string files;
    for (const std::string& file : options.files) files += " xxh3:" + checksum(io::read_file(file));
    facts.set("--tasks, --shots and --max-questions",
              fmt::format("{} {}{}", options.task.shots, options.task.max_questions, files));
  });
  const Config config = inputs.config;
  use_threads(config.train.threads, ranks);
  const std::string what = inputs.files.path + inputs.files.step_text();
  const int64_t step = inputs.files.step, trained_tokens = inputs.files.tokens;
  const bool leads = ranks.rank() == 0;
  require_sharing(ranks, "eval", config);
  const int64_t tokens = tokens_per_micro_batch(config);
  const TrainedModel trained(std::move(inputs.files), tokens, ranks.size() > 1 ? &ranks : nullptr);
  ForwardMemory memory(trained, tokens);
  if (leads && !json)
    fmt::print("{}\n\n{:<24}{:>10}{:>16}{:>16}{:>14}\n", what, "task", "questions", "accuracy", "by bytes",
               "nats/byte");
  nlohmann::ordered_json results = nlohmann::ordered_json::object();
  for (const Task& task : tasks) {
    const auto result = answer_task(memory.ctx(), trained.model(), memory.buffers(), trained.tokenizer(),
                                    config.data, task, options.task, [] { return false; });
    if (!leads) continue;
    if (json) {
      results[result->name] = to_json(*result);
      continue;
    }
    const auto percent = [](double value, double error) {
      return fmt::format("{:.1f}% +- {}", 100 * value, figure(100 * error, 1));
    };
    fmt::print("{:<24}{:>10}{:>16}{:>16}{:>14.4f}{}{}\n", result->name, result->questions,
               percent(result->accuracy, result->error), percent(result->accuracy_bytes, result->error_bytes),
               result->answer_loss, result->cuts().empty() ? "" : "  ", result->cuts());
  }
  if (!leads || !json) return;
  nlohmann::ordered_json line = {
      {"schema", 1}, {"step", step}, {"tokens", trained_tokens}, {"tasks", results}};
  if (step < 0) line["step"] = line["tokens"] = nullptr;  // a folder of no run
  fmt::print("{}\n", line.dump());
}

}  // namespace sluice
