#pragma once
// `sluice ruler`: runs a trained model on RULER's tasks (ruler_tasks.h) and keeps every answer, so that a run
// that was cut short goes on.
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval/batch_generate.h"
#include "eval/ruler_tasks.h"

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

/// One answered prompt: a line of the file of results.
struct RulerAnswer {
  RulerTask task;
  int64_t length = 0, sample = 0;
  double depth = -1, score = 0;
  int64_t tokens = 0;  // of the prompt
  std::vector<std::string> outputs;
  std::string prediction;
};

/// Prompts in RULER's own form: JSONL with "input", "outputs" and, in newer files, "answer_prefix", which is
/// a part of the prompt. Error(data) with file and line.
std::vector<RulerPrompt> read_ruler_prompts(const std::string& path);
/// The task that a file of prompts is named after: FOLDER/TASK/validation.jsonl or TASK.jsonl. Error(usage).
RulerTask task_of_file(const std::string& path);

/// The file of answers: one line of JSON that says what they depend on, then one line per answer. Opening it
/// again drops a last line that was cut short. Error(usage) if its first line differs from `header`.
class RulerResults {
 public:
  RulerResults(const std::string& path, const nlohmann::ordered_json& header);
  bool has(RulerTask task, int64_t length, int64_t sample) const;
  void add(const RulerAnswer& answer);
  const std::vector<RulerAnswer>& answers() const { return answers_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::vector<RulerAnswer> answers_;
};

/// Answers what the results lack, as many prompts at once as the model keeps sequences. `stop` is asked after
/// each answer; false if it ended the run. `progress` is called for every answer. Error(usage): a prompt with
/// what is generated is longer than the model's context.
bool run_ruler(CachedModel& model, const Tokenizer& tokenizer, std::optional<int32_t> begin_token,
               const std::vector<RulerCell>& cells, RulerResults& results,
               const std::function<void(const RulerAnswer&)>& progress, const std::function<bool()>& stop);

/// {"schema": 1, ...header, "cells": [{task, length, samples, score}], "average": {length: score},
/// "depths": [{task, length, depth, samples, score}]}: scores in percent; only samples below those of the
/// cells, and averages over those tasks that have every length.
nlohmann::ordered_json ruler_summary(const std::vector<RulerAnswer>& answers,
                                     const nlohmann::ordered_json& header);
/// The same as a table: a row per task, a column per length, the average below.
std::string ruler_table(const nlohmann::ordered_json& summary);

}  // namespace sluice
