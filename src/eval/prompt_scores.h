#pragma once
// Log-probabilities of the tokens of a prompt, with the most probable alternatives.
#include <map>
#include <memory>
#include <span>
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

/// A prompt to score.
struct ScoredPrompt {
  std::vector<int32_t> tokens;  // one or more; at most the model's context
  int64_t alternatives = 0;     // of every token
  bool next = false;            // whether the logits behind the last token are wanted
};

struct PromptScore {
  std::vector<TokenScore> tokens;  // of every token but the first, from those before it
  std::vector<float> next;         // (V), or empty
};

/// Prompts are packed into forward passes of up to the model's context of tokens, in each of which a prompt
/// sees itself alone. The memory of a pass is taken when the first of its size is made.
class PromptScores {
 public:
  /// context: most tokens of a prompt and of a pass.
  PromptScores(const TrainedModel& trained, int64_t context);
  ~PromptScores();

  std::vector<PromptScore> score(std::span<const ScoredPrompt> prompts);

 private:
  struct Pass;
  struct Packed {
    size_t prompt;
    int64_t begin, end;  // rows of a pass
  };
  Pass& pass(int64_t rows);
  void run(std::span<const ScoredPrompt> prompts, const std::vector<Packed>& packed,
           std::vector<PromptScore>& out);

  const TrainedModel& trained_;
  int64_t context_;
  std::map<int64_t, std::unique_ptr<Pass>> passes_;  // by rows
};

}  // namespace sluice
