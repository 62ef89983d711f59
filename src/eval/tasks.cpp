#include "eval/tasks.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "eval/sample_rows.h"

namespace sluice {
namespace {

/// One forward pass, filled with sequences one behind the other.
class PackedPass {
 public:
  PackedPass(Context& ctx, const Transformer& model, ForwardBuffers& buffers)
      : ctx_(ctx), model_(model), buffers_(buffers), rows_(model, buffers), size_(rows_.tokens()) {}

  bool fits(const ScoredSequence& sequence) const { return used_ + std::ssize(sequence.tokens) - 1 <= size_; }

  void add(const ScoredSequence& sequence, double& sum) {
    const int64_t inputs = std::ssize(sequence.tokens) - 1;
    SLUICE_CHECK(inputs >= 1 && fits(sequence), "log_likelihoods: {} tokens do not fit into {}", inputs,
                 size_);
    for (int64_t i = 0; i < inputs; ++i) {
      const bool scored = i + 1 >= static_cast<int64_t>(sequence.first_target);
      rows_.put(used_ + i, sequence.tokens[static_cast<size_t>(i)],
                scored ? sequence.tokens[static_cast<size_t>(i) + 1] : -1, i, used_);
    }
    parts_.push_back({used_, inputs, &sum});
    used_ += inputs;
  }

  /// Computes, and adds to the sums.
  void run() {
    if (parts_.empty()) return;
    // What is left is a sequence of token 0 without targets.
    for (int64_t i = used_; i < size_; ++i)
      rows_.put(i, 0, -1, std::min<int64_t>(i - used_, parts_[0].inputs - 1), used_);
    rows_.upload(ctx_);
    model_.forward(ctx_, buffers_.batch, buffers_.saved);
    model_.loss_forward(ctx_, buffers_.losses, buffers_.batch, buffers_.saved);
    const std::vector<double> losses = rows_.losses(ctx_);
    const int32_t* const targets = rows_.whole().targets.as<int32_t>();
    for (const Part& part : parts_)
      for (int64_t i = part.begin; i < part.begin + part.inputs; ++i)
        if (targets[i] >= 0) *part.sum -= losses[static_cast<size_t>(i)];
    parts_.clear();
    used_ = 0;
  }

 private:
  struct Part {
    int64_t begin = 0, inputs = 0;
    double* sum = nullptr;
  };

  Context& ctx_;
  const Transformer& model_;
  ForwardBuffers& buffers_;
  SampleRows rows_;
  int64_t size_, used_ = 0;
  std::vector<Part> parts_;
};

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

/// Without the white space in front, which belongs to the context.
double bytes_of(const std::string& continuation) {
  const size_t first = std::min(continuation.find_first_not_of(" \t\r\n"), continuation.size() - 1);
  return static_cast<double>(continuation.size() - first);
}

double standard_error(double p, int64_t n) { return std::sqrt(p * (1 - p) / static_cast<double>(n - 1)); }

}  // namespace

ScoredSequence scored_sequence(const Tokenizer& tokenizer, std::optional<int64_t> begin_token,
                               const std::string& context, const std::string& continuation, int64_t most) {
  const size_t text_end = context.find_last_not_of(" \t\r\n\v\f");
  const std::string before = context.substr(0, text_end == std::string::npos ? 0 : text_end + 1);
  ScoredSequence out;
  out.tokens = tokenizer.encode(context + continuation);
  size_t length = tokenizer.encode(before).size();
  // A tokenizer may join the end of the context with the continuation; something must be left to score.
  length = std::min(length, out.tokens.empty() ? 0 : out.tokens.size() - 1);
  if (begin_token || length == 0) {
    const int64_t first = begin_token.value_or(tokenizer.end_of_document());
    out.tokens.insert(out.tokens.begin(), static_cast<int32_t>(first));
    ++length;
  }
  out.first_target = length;
  if (const int64_t over = std::ssize(out.tokens) - (most + 1); over > 0) {
    out.truncated = true;
    out.tokens.erase(out.tokens.begin(), out.tokens.begin() + over);
    out.first_target = static_cast<size_t>(std::max<int64_t>(static_cast<int64_t>(length) - over, 1));
  }
  return out;
}

std::optional<std::vector<double>> log_likelihoods(Context& ctx, const Transformer& model,
                                                   ForwardBuffers& buffers,
                                                   const std::vector<ScoredSequence>& sequences,
                                                   const std::function<bool()>& stop) {
  std::vector<double> sums(sequences.size(), 0.0);
  PackedPass pass(ctx, model, buffers);
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i].tokens.size() < 2) continue;  // nothing to predict
    if (!pass.fits(sequences[i])) {
      if (stop()) return std::nullopt;
      pass.run();
    }
    pass.add(sequences[i], sums[i]);
  }
  if (stop()) return std::nullopt;
  pass.run();
  return sums;
}

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
      result.truncated += sequences.back().truncated;
    }
  const auto sums = log_likelihoods(ctx, model, buffers, sequences, stop);
  if (!sums) return std::nullopt;
  size_t at = 0;
  double right = 0, right_bytes = 0;
  for (auto question = begin_question; question != end_question; ++question) {
    std::vector<double> all, per_byte;
    for (const TaskChoice& choice : question->choices) {
      all.push_back((*sums)[at++]);
      if (std::isnan(all.back()))
        fail(ExitCode::numeric,
             "task {}, question {}: the log-likelihood of choice {} is not a number: the model's logits are "
             "not "
             "finite",
             task.name, question - task.questions.begin() + 1, all.size());
      per_byte.push_back(all.back() / bytes_of(choice.continuation));
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
  return fmt::format("  task {}  accuracy {:.1f}% +- {:.1f}  by bytes {:.1f}% +- {:.1f}  ({} questions{}{})",
                     r.name, 100 * r.accuracy, 100 * r.error, 100 * r.accuracy_bytes, 100 * r.error_bytes,
                     r.questions, r.shots > 0 ? fmt::format(", {} shots", r.shots) : "",
                     r.truncated > 0 ? fmt::format(", {} contexts truncated", r.truncated) : "");
}

}  // namespace sluice
