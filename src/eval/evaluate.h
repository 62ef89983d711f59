#pragma once
// Validation: loss, perplexity and bits per byte of every named set, in file order, and what the attention
// does.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "analysis/summary.h"
#include "data/loader.h"
#include "data/tokenizer.h"
#include "nn/forward_buffers.h"

namespace sluice {

/// Figures of no tokens are not numbers: null in JSON.
struct SetResult {
  std::string name;
  double loss = 0;           // mean over targets, nats
  double perplexity = 0;     // exp(loss)
  double bits_per_byte = 0;  // nats of tokens that stand for text / (ln 2 * the bytes of text read for them)
  int64_t tokens = 0;        // targets
  TextLoss loss_of_text =
      {};  // where the tokenizer drops text, it has been read all the same, and is counted
};

struct EvalResult {
  std::vector<SetResult> sets;
  ModelSummary analysis;  // over the first batches of every set
};

/// A figure in a table: "-" where it is not a number.
std::string figure(double value, int digits);

/// "val kjv  loss 1.234  ppl 3.43  1.71 bits/byte  (123k tokens)" per set, then the analysis.
std::vector<std::string> describe(const EvalResult& result);

class Evaluator {
 public:
  /// Opens every validation set. max_tokens per set; 0: all of it.
  Evaluator(const std::vector<DataSource>& sets, const Config& config, const Tokenizer& tokenizer,
            int64_t max_tokens);

  bool empty() const { return sets_.empty(); }
  const std::vector<std::unique_ptr<Blend>>& blends() const { return sets_; }

  /// `buffers` for the losses, `analysed` for the analysis; they may be the same. `stop` is asked between
  /// batches; when it says yes the evaluation is given up and nothing is returned. zeroing: of every forward
  /// pass.
  std::optional<EvalResult> run(Context& ctx, const Transformer& model, ForwardBuffers& buffers,
                                ForwardBuffers& analysed, const std::function<bool()>& stop,
                                const ValueZeroing* zeroing = nullptr) const;

 private:
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Blend>> sets_;
  std::vector<TextLoss> text_loss_;   // per set
  std::vector<int64_t> token_bytes_;  // per token id
  int64_t seq_len_, max_tokens_;
};

}  // namespace sluice
