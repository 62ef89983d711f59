#pragma once
// The files of `sluice ruler`: prompts in RULER's own form, and the answers that were given so far, with
// their scores.
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/file_lock.h"
#include "eval/ruler_tasks.h"

namespace sluice {

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
/// Where several ranks answer, each keeps its answers in a file of its own, PATH.rank1 and so on, until rank
/// 0 takes them over: at the end, or when it opens the file after ranks were killed. Rank 0 holds a lock,
/// PATH.lock, so that no other program answers the same prompts or takes over answers that are still written.
class RulerResults {
 public:
  /// Rank 0 first: the others read what it has written. keeps: whether answers are written, or only those of
  /// others are known. Error(cannot_create) if another program holds the lock.
  RulerResults(const std::string& path, const nlohmann::ordered_json& header, int rank = 0,
               bool keeps = true);
  /// Rank 0: takes over what the other ranks have kept, and removes their files.
  void take_over();
  bool has(RulerTask task, int64_t length, int64_t sample) const;
  void add(const RulerAnswer& answer);
  const std::vector<RulerAnswer>& answers() const { return answers_; }
  const std::string& path() const { return path_; }

 private:
  void read(const std::string& path);

  std::string path_, header_, kept_in_;  // kept_in: empty where nothing is written
  std::optional<FileLock> lock_;  // of rank 0
  std::vector<RulerAnswer> answers_;
};

/// {"schema": 1, ...header, "cells": [{task, length, samples, score}], "average": {length: score},
/// "depths": [{task, length, depth, samples, score}]}: scores in percent; only samples below those of the
/// cells, and averages over those tasks that have every length.
nlohmann::ordered_json ruler_summary(const std::vector<RulerAnswer>& answers,
                                     const nlohmann::ordered_json& header);
/// The same as a table: a row per task, a column per length, the samples of each length ("100-500" where they
/// differ), the average below.
std::string ruler_table(const nlohmann::ordered_json& summary);

}  // namespace sluice
