#pragma once
// RULER's needles without decoding: is the value that a key asks for more likely than nine others? Cheap
// enough for every evaluation of a training (eval.ruler).
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "eval/scored_sequences.h"
#include "nn/forward_buffers.h"

namespace sluice {

/// Of one task at one length.
struct RulerChoice {
  std::string task;
  int64_t length = 0, samples = 0;
  double accuracy = 0;  // share of the samples whose true value is the most likely of the ten
  double loss = 0;      // of a true value's tokens together, nats; mean over samples
  double margin = 0;    // log-likelihood of the true value less that of the best other one; mean
};

class RulerChoices {
 public:
  RulerChoices() = default;
  /// Makes all prompts of eval.ruler. Error(usage): a length is too short for a prompt.
  RulerChoices(const Config& config, const Tokenizer& tokenizer);
  bool empty() const { return cells_.empty(); }

  /// As many values at once as fit into the tokens of `buffers`. Nothing if `stop`, which is called between
  /// forward passes, returned true.
  std::optional<std::vector<RulerChoice>> run(Context& ctx, const Transformer& model, ForwardBuffers& buffers,
                                              const std::function<bool()>& stop,
                                              const ValueZeroing* zeroing) const;

 private:
  struct Cell {
    std::string task;
    int64_t length = 0;
    std::vector<ScoredSequence> values;  // ten per sample, the true one first
  };
  void add(Cell& cell, const std::string& prompt, const std::vector<std::string>& values,
           const Tokenizer& tokenizer) const;

  std::vector<Cell> cells_;
  std::optional<int32_t> begin_token_;
  int64_t seq_len_ = 0;
};

/// "  ruler niah_single_1 at 256: 35.0% of 20 right (one in ten by chance), true value 4.21 nats".
std::string describe(const RulerChoice& choice);

}  // namespace sluice
