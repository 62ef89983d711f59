#pragma once
// Continuations of many prompts of different lengths, several at a time.
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "eval/cached_model.h"

namespace sluice {

struct Continuation {
  std::vector<int32_t> prompt;
  int64_t new_tokens = 0;  // at most
};

/// Continues every prompt, as many at once as `model` keeps sequences: where one ends, the next prompt takes
/// its place. What a prompt has in common with the beginning of one that is kept, in whole chunks, is taken
/// from there. choose(i, logits (V)) says the next token of prompt i; on_token(i, token) follows, and ends
/// the prompt where it returns false. on_done(i) follows then, and returns false to end everything.
/// Error(usage): a prompt is empty, or longer with its new tokens than the model's context.
void continue_prompts(CachedModel& model, std::span<const Continuation> prompts,
                      const std::function<int32_t(int64_t, std::span<const float>)>& choose,
                      const std::function<bool(int64_t, int32_t)>& on_token,
                      const std::function<bool(int64_t)>& on_done);

/// The same with the most probable tokens.
void continue_greedily(CachedModel& model, std::span<const Continuation> prompts,
                       const std::function<bool(int64_t, int32_t)>& on_token,
                       const std::function<bool(int64_t)>& on_done);

}  // namespace sluice
