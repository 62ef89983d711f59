#pragma once
// Validation: loss, perplexity and bits per byte of every set, in file order, and a summary of its attention.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "analysis/summary.h"
#include "data/loader.h"
#include "data/tokenizer.h"
#include "eval/ruler_choice.h"
#include "eval/samples.h"
#include "eval/tasks.h"
#include "nn/forward_buffers.h"

namespace sluice {

/// The targets that follow input tokens of one class (analysis.query_classes).
struct ClassResult {
  std::string name;
  double loss = 0;          // mean, nats
  double share_likely = 0;  // share of the targets that have a probability above 1/2, and so the largest one
  int64_t tokens = 0;
};

/// The targets of the tokens at positions [from, to).
struct PositionResult {
  int64_t from = 0, to = 0;
  double loss = 0;  // mean, nats
  int64_t tokens = 0;
};

/// Results over zero tokens are NaN, and null in JSON.
struct SetResult {
  std::string name;
  double loss = 0;             // mean over targets, nats
  double perplexity = 0;       // exp(loss)
  double bits_per_byte = 0;    // nats of the tokens that represent text / (ln 2 * bytes of that text)
  int64_t tokens = 0;          // targets
  TextLoss loss_of_text = {};  // counts dropped text, too
  std::vector<ClassResult> classes = {};  // empty without analysis.query_classes
  /// In octaves of the number of tokens that a token sees before itself: 0 to 64, 64 to 128, 128 to 256, ...
  /// up to data.seq_len, so that one sees where a context breaks; without those that have no target.
  std::vector<PositionResult> by_position = {};
};

struct EvalResult {
  std::vector<SetResult> sets;
  ModelSummary analysis;                 // over the first batches of every set
  std::vector<RulerChoice> ruler = {};   // of eval.ruler
  std::vector<TaskResult> tasks = {};    // of eval.tasks
  std::vector<SampleText> samples = {};  // of eval.prompts
};

/// The octave of a number of tokens: 0 below 64, 1 below 128, and so on.
int64_t octave_of(int64_t position);

/// A number in a table; "-" for NaN.
std::string figure(double value, int digits);

/// "val kjv  loss 1.234  ppl 3.43  1.71 bits/byte  (123k tokens)" per set, then the analysis. Losses by
/// class, and the line of sinks, where there are any.
std::vector<std::string> describe(const EvalResult& result);
/// "of "other" 83.0%, of "trigger" 12.0%", or the mean over all queries without classes.
std::string describe_strongest(const ModelSummary& summary);

class Evaluator {
 public:
  /// Opens every validation set, and makes the prompts of eval.ruler. max_tokens per set; 0: all of it.
  Evaluator(const std::vector<DataSource>& sets, const Config& config, const Tokenizer& tokenizer,
            int64_t max_tokens);

  /// Every run answers these tasks and continues these prompts, too (eval.tasks, eval.prompts). tokenizer:
  /// the constructor's, which outlives this.
  void also(std::vector<Task> tasks, const Config& config, const Tokenizer& tokenizer);

  bool empty() const { return sets_.empty() && ruler_.empty(); }
  const std::vector<std::unique_ptr<Blend>>& blends() const { return sets_; }

  /// store: the model's. `buffers` are for the losses and `analysed` for the analysis; they may be the same.
  /// `stop` is called between batches; if it returns true, the evaluation ends and returns nothing. zeroing
  /// applies to every forward pass over the sets. alone: one rank runs it; otherwise all ranks of the
  /// training do, in as many forward passes, whatever the model finds.
  std::optional<EvalResult> run(Context& ctx, const Transformer& model, const ParamStore& store,
                                ForwardBuffers& buffers, ForwardBuffers& analysed,
                                const std::function<bool()>& stop, const ValueZeroing* zeroing = nullptr,
                                bool alone = true) const;

 private:
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Blend>> sets_;
  std::vector<TextLoss> text_loss_;   // per set
  std::vector<int64_t> token_bytes_;  // per token id
  std::vector<bool> of_text_;         // per token id: whether it stands for text
  AnalysisConfig analysis_;
  QueryClasses classes_;
  RulerChoices ruler_;
  int64_t seq_len_, max_tokens_;
  std::vector<Task> tasks_;
  EvalConfig more_;
  DataConfig data_;
  int64_t vocab_size_ = 0;
  const Tokenizer* tokenizer_ = nullptr;
};

}  // namespace sluice
