#pragma once
// Text generation with a trained model: prefill, then one token at a time with a KV cache.
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "eval/trained_model.h"

namespace sluice {

struct Sampling {
  double temperature = 1.0;  // 0: the most probable token
  int64_t top_k = 0;         // 0: all
  double top_p =
      1.0;  // nucleus sampling: the smallest set of most probable tokens with this total probability
  uint64_t seed = 0;
};

/// Samples one token from logits (V) with the random number u in (0, 1). Ties go to the lower id.
int32_t sample(const std::vector<float>& logits, const Sampling& sampling, double u);

class Generator {
 public:
  explicit Generator(const TrainedModel& trained);

  /// Calls on_token for each new token, at most max_new_tokens times; on_token returns false to stop. When
  /// the context (the length of the rotary table) is full, generation continues from its last half.
  void run(const std::vector<int32_t>& prompt, int64_t max_new_tokens, const Sampling& sampling,
           const std::function<bool(int32_t)>& on_token);

 private:
  struct Pass;  // memory of a forward pass over n tokens
  const std::vector<float>& feed(const std::vector<int32_t>& tokens);

  const TrainedModel& trained_;
  int64_t context_length_;
  std::unique_ptr<Arena> cache_memory_;
  KeyValueCache cache_;
  std::unique_ptr<Pass> one_;
  std::vector<int32_t> history_;  // all tokens so far
  std::vector<float> logits_;     // after the last of them

 public:
  ~Generator();
};

}  // namespace sluice
