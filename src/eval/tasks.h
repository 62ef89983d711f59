#pragma once
// Multiple-choice tasks answered by log-likelihood: of the continuations of a context the model chooses the
// one that is most probable, as a whole or per byte (Brown et al. 2020, arXiv 2005.14165, section 2.4; the
// harness of Gao et al., EleutherAI).
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "nn/forward_buffers.h"

namespace sluice {

struct TaskChoice {
  std::string context, continuation;
};

struct TaskQuestion {
  std::vector<TaskChoice> choices;  // two or more
  size_t answer = 0;
};

struct Task {
  std::string name;  // the file's, without folder and extension
  std::vector<TaskQuestion> questions;
};

/// Reads a task from JSONL. A line is {"context": TEXT, "choices": [TEXT...], "answer": NUMBER}; or, where
/// the contexts differ and not the continuation, {"contexts": [TEXT...], "continuation": TEXT, "answer":
/// NUMBER}. Error(data) with file and line.
Task read_task(const std::string& path);
/// Reads several. Error(usage) for two of one name, under which their results would be one.
std::vector<Task> read_tasks(const std::vector<std::string>& paths);

struct TaskOptions {
  int64_t shots = 0;          // the first questions of the file, solved, stand before every other
  int64_t max_questions = 0;  // 0: all that are not shots
};

struct TaskResult {
  std::string name;
  int64_t questions = 0, shots = 0;
  double accuracy = 0;  // the continuation with the largest log-likelihood is the answer
  double accuracy_bytes =
      0;  // with the largest one per byte of the continuation, without white space in front
  double error = 0,
         error_bytes = 0;  // standard errors of these two, sqrt(p (1 - p) / (n - 1)); NaN for n = 1
  double answer_loss = 0;  // mean nats per byte of the right continuation
  int64_t contexts_cut = 0;  // at their beginning, to fit into the model's sequence
  int64_t choices_cut = 0;   // longer than the model's sequence: their end alone is scored
  std::vector<std::vector<double>> log_likelihoods;  // of each question's continuations, nats

  /// What was cut, in words; empty where nothing was.
  std::string cuts() const;
};

/// Answers a task. seq_len: most inputs of a sequence, at most the buffers' tokens. Error(numeric) where a
/// log-likelihood is not a number, since none is the largest then.
std::optional<TaskResult> answer_task(Context& ctx, const Transformer& model, ForwardBuffers& buffers,
                                      const Tokenizer& tokenizer, const DataConfig& data, const Task& task,
                                      const TaskOptions& options, const std::function<bool()>& stop);

/// "  task hellaswag  accuracy 31.2% +- 0.5  by bytes 33.0% +- 0.5  (10042 questions, 5 shots)".
std::string describe(const TaskResult& result);

}  // namespace sluice
