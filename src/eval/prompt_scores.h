#pragma once
// Log-probabilities of the tokens of a prompt, with the most probable alternatives.
#include <memory>
#include <utility>
#include <vector>

#include "eval/trained_model.h"

namespace sluice {

struct TokenScore {
  double log_probability = 0;                            // nats
  std::vector<std::pair<int32_t, double>> alternatives;  // the most probable tokens, in falling order
};

/// The log-probability of a token under logits (V), and the `count` most probable ones.
TokenScore token_score(const float* logits, int64_t vocab_size, int32_t token, int64_t count);

class PromptScores {
 public:
  explicit PromptScores(const TrainedModel& trained);
  ~PromptScores();

  /// Of every token but the first, from those before it; at most the model's context of tokens.
  std::vector<TokenScore> score(const std::vector<int32_t>& tokens, int64_t alternatives);

 private:
  struct Memory;
  const TrainedModel& trained_;
  std::unique_ptr<Memory> memory_;
};

}  // namespace sluice
