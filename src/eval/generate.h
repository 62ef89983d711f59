#pragma once
// Text generation with a trained model: prefill, then one token at a time with a KV cache.
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "eval/cached_model.h"
#include "eval/sampling.h"

namespace sluice {

/// Samples one token from logits (V) with the random number u in (0, 1). Ties go to the lower id.
/// Error(numeric) as for require_numbers.
int32_t sample(std::span<const float> logits, const Sampling& sampling, double u);

class Generator {
 public:
  explicit Generator(const TrainedModel& trained);

  /// Calls on_token for each new token, at most max_new_tokens times; on_token returns false to stop. When
  /// the context (the length of the rotary table) is full, generation continues from its last half. A model
  /// that was trained with data.begin_token sees that token first, in every context; the prompt does not
  /// contain it, and may be empty only then.
  void run(const std::vector<int32_t>& prompt, int64_t max_new_tokens, const Sampling& sampling,
           const std::function<bool(int32_t)>& on_token);

  /// Tokens of a prompt that fit into the context; of a longer one the end is read.
  int64_t most_prompt_tokens() const { return context_length_ - (begin_token_ ? 1 : 0); }

  /// Within on_token: the logits (V) from which the token was taken.
  std::span<const float> logits() const { return logits_; }

 private:
  std::vector<int32_t> context_of(int64_t count) const;

  int64_t context_length_;
  std::optional<int32_t> begin_token_;
  CachedModel model_;             // with one sequence
  std::vector<int32_t> history_;  // all tokens so far
  std::span<const float> logits_;
};

}  // namespace sluice
