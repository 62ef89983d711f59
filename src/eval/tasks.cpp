#include "eval/tasks.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "eval/scored_sequences.h"

namespace sluice {
namespace {

/// Solved questions in front of the others.
std::string solved(const Task& task, int64_t shots) {
  std::string text;
  for (int64_t i = 0; i < shots; ++i) {
    const TaskQuestion& question = task.questions[static_cast<size_t>(i)];
    const TaskChoice& right = question.choices[question.answer];
    text += right.context + right.continuation + "\n\n";
  }
  return text;
}

/// Without the white space in front, which belongs to the context. Of a continuation that is longer than a
/// sequence those that are scored.
double bytes_of(const std::string& continuation, const Tokenizer& tokenizer, const ScoredSequence& sequence) {
  if (sequence.unscored > 0) {
    const auto first = sequence.tokens.begin() + static_cast<int64_t>(sequence.first_target);
    const std::string scored =
        tokenizer.decode_behind({sequence.tokens.begin(), first}, {first, sequence.tokens.end()});
    return static_cast<double>(std::max<size_t>(scored.size(), 1));
  }
  const size_t first = std::min(continuation.find_first_not_of(" \t\r\n"), continuation.size() - 1);
  return static_cast<double>(continuation.size() - first);
}

double standard_error(double p, int64_t n) { return std::sqrt(p * (1 - p) / static_cast<double>(n - 1)); }

}  // namespace

std::optional<TaskResult> answer_task(Context& ctx, const Transformer& model, ForwardBuffers& buffers,
                                      const Tokenizer& tokenizer, const DataConfig& data, const Task& task,
                                      const TaskOptions& options, const std::function<bool()>& stop) {
  TaskResult result;
  result.name = task.name;
  result.shots = options.shots;
  int64_t end = std::ssize(task.questions);
  if (options.shots >= end)
    fail(ExitCode::usage, "task {}: {} shots leave none of its {} questions", task.name, options.shots, end);
  if (options.max_questions > 0) end = std::min(end, options.shots + options.max_questions);
  const std::string examples = solved(task, options.shots);
  std::vector<ScoredSequence> sequences;
  const auto begin_question = task.questions.begin() + options.shots,
             end_question = task.questions.begin() + end;
  for (auto question = begin_question; question != end_question; ++question)
    for (const TaskChoice& choice : question->choices) {
      sequences.push_back(scored_sequence(tokenizer, data.begin_token, examples + choice.context,
                                          choice.continuation, data.seq_len));
      result.contexts_cut += sequences.back().context_cut;
      result.choices_cut += sequences.back().unscored > 0;
    }
  const auto sums = log_likelihoods(ctx, model, buffers, sequences, stop);
  if (!sums) return std::nullopt;
  size_t at = 0;
  double right = 0, right_bytes = 0;
  for (auto question = begin_question; question != end_question; ++question) {
    std::vector<double> all, per_byte;
    for (const TaskChoice& choice : question->choices) {
      all.push_back((*sums)[at]);
      if (std::isnan(all.back()))
        fail(ExitCode::numeric,
             "task {}, question {}: the log-likelihood of choice {} is not a number: the model's logits are "
             "not "
             "finite",
             task.name, question - task.questions.begin() + 1, all.size());
      per_byte.push_back(all.back() / bytes_of(choice.continuation, tokenizer, sequences[at++]));
    }
    const auto best = [](const std::vector<double>& v) {
      return static_cast<size_t>(std::max_element(v.begin(), v.end()) - v.begin());
    };
    right += best(all) == question->answer;
    right_bytes += best(per_byte) == question->answer;
    result.answer_loss -= per_byte[question->answer];
    result.log_likelihoods.push_back(std::move(all));
  }
  result.questions = end - options.shots;
  const auto n = static_cast<double>(result.questions);
  result.accuracy = right / n;
  result.accuracy_bytes = right_bytes / n;
  result.error = standard_error(result.accuracy, result.questions);
  result.error_bytes = standard_error(result.accuracy_bytes, result.questions);
  result.answer_loss /= n;
  return result;
}

std::string describe(const TaskResult& r) {
  return fmt::format(
      "  task {}  accuracy {:.1f}% +- {:.1f}  by bytes {:.1f}% +- {:.1f}  ({} questions{}{}{})", r.name,
      100 * r.accuracy, 100 * r.error, 100 * r.accuracy_bytes, 100 * r.error_bytes, r.questions,
      r.shots > 0 ? fmt::format(", {} shots", r.shots) : "", r.cuts().empty() ? "" : ", ", r.cuts());
}

std::string TaskResult::cuts() const {
  std::string text;
  if (contexts_cut > 0) text = fmt::format("{} contexts truncated", contexts_cut);
  if (choices_cut > 0)
    text += fmt::format("{}{} choices longer than a sample, of which the end is scored",
                        text.empty() ? "" : ", ", choices_cut);
  return text;
}

}  // namespace sluice
