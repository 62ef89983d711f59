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
#include "nn/forward_buffers.h"

namespace sluice {

/// Results over zero tokens are NaN, and null in JSON.
struct SetResult {
  std::string name;
  double loss = 0;             // mean over targets, nats
  double perplexity = 0;       // exp(loss)
  double bits_per_byte = 0;    // nats of the tokens that represent text / (ln 2 * bytes of that text)
  int64_t tokens = 0;          // targets
  TextLoss loss_of_text = {};  // counts dropped text, too
};

struct EvalResult {
  std::vector<SetResult> sets;
  ModelSummary analysis;  // over the first batches of every set
};

/// A number in a table; "-" for NaN.
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

  /// `buffers` are for the losses and `analysed` for the analysis; they may be the same. `stop` is called
  /// between batches; if it returns true, the evaluation ends and returns nothing. zeroing applies to every
  /// forward pass.
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
